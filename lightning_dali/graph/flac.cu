// FLAC (RFC 9639) with a thread a frame: `find_frames`, `decode_frames`, `check_frames`, `finish_samples`, in that order on one stream.
//
// Only streams of fixed block size and known length, whose STREAMINFO the host has read. A status other than 0 means that something is
// not as it should be, in which case the row's samples are undefined and another decoder has the last word. Whatever the bytes are,
// nothing outside a row's bytes has influence, and every loop ends. Compiles without any header (NVRTC).
//
// Over 300 lines: NVRTC compiles one file.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// One row as the host writes it; positions count bytes of the whole batch. `flac.py` has the same order.
struct Row {
    int start;         // first byte; a multiple of 4
    int stop;          // byte after the last one
    int audio;         // first byte of the first frame
    int first_frame;   // number of its first frame in the batch
    int num_frames;
    int num_samples;
    int block_size;
    int num_channels;
    int bits;
    int sample_rate;
};

struct Header {
    int number;
    int size;
    int assignment;
    int length;
};

const int MANY = 12;       // coefficients that are held in registers in the usual case: libFLAC's presets have no more
const int MOST = 32;       // and what the format allows
const int SHARES = 32;     // threads that share the CRC-16 of a frame
const int LEFT_SIDE = 8, SIDE_RIGHT = 9, MID_SIDE = 10;

// -- headers

__device__ int samples_of(const Row& row, int number) {
    int rest = row.num_samples - number * row.block_size;
    return rest < row.block_size ? rest : row.block_size;
}

__device__ int bits_of(int code) {
    return code == 1 ? 8 : code == 2 ? 12 : code == 4 ? 16 : code == 5 ? 20 : code == 6 ? 24 : code == 7 ? 32 : 0;
}

__device__ int rate_of(int code) {
    switch (code) {
        case 1: return 88200;
        case 2: return 176400;
        case 3: return 192000;
        case 4: return 8000;
        case 5: return 16000;
        case 6: return 22050;
        case 7: return 24000;
        case 8: return 32000;
        case 9: return 44100;
        case 10: return 48000;
        case 11: return 96000;
        default: return 0;
    }
}

__device__ u32 crc8(const u8* bytes, int length) {
    u32 crc = 0;
    for (int i = 0; i < length; i++) {
        crc ^= bytes[i];
        for (int bit = 0; bit < 8; bit++) crc = (crc << 1) ^ (crc & 0x80 ? 0x107 : 0);
    }
    return crc;
}

// Whether a header starts at `at` that agrees with STREAMINFO.
__device__ bool read_header(const u8* bytes, int at, const Row& row, Header& header) {
    if (row.stop - at < 10 || bytes[at] != 0xFF || bytes[at + 1] != 0xF8) return false;
    int size_code = bytes[at + 2] >> 4, rate_code = bytes[at + 2] & 15;
    int assignment = bytes[at + 3] >> 4, bits_code = bytes[at + 3] >> 1 & 7;
    if (bytes[at + 3] & 1 || size_code == 0 || rate_code == 15 || assignment > MID_SIDE) return false;
    if ((assignment < LEFT_SIDE ? assignment + 1 : 2) != row.num_channels) return false;
    if (bits_code != 0 && bits_of(bits_code) != row.bits) return false;

    int next = at + 5, first = bytes[at + 4];
    int more = first < 0x80 ? 0 : first < 0xC0 ? -1 : first < 0xE0 ? 1 : first < 0xF0 ? 2 : first < 0xF8 ? 3 : first < 0xFC ? 4
             : first < 0xFE ? 5 : -1;
    if (more < 0 || row.stop - next < more + 5) return false;  // no frame has fewer than 5 bytes after its number
    u32 number = more ? first & (0x3F >> more) : first;
    for (; more > 0; more--) {
        int byte = bytes[next++];
        if (byte >> 6 != 2) return false;
        number = number << 6 | (byte & 0x3F);
    }
    if (number >= (u32)row.num_frames) return false;

    int size = size_code == 1 ? 192 : size_code < 6 ? 576 << (size_code - 2) : 256 << (size_code & 7);
    if (size_code == 6) {
        size = bytes[next++] + 1;
    } else if (size_code == 7) {
        size = (bytes[next] << 8 | bytes[next + 1]) + 1;
        next += 2;
    }
    if (size != samples_of(row, number)) return false;
    int rate = rate_of(rate_code);
    if (rate_code == 12) {
        rate = bytes[next++] * 1000;
    } else if (rate_code > 12) {
        rate = (bytes[next] << 8 | bytes[next + 1]) * (rate_code == 14 ? 10 : 1);
        next += 2;
    }
    if (rate_code != 0 && rate != row.sample_rate) return false;
    if (crc8(bytes + at, next - at) != bytes[next]) return false;
    header.number = number;
    header.size = size;
    header.assignment = assignment;
    header.length = next + 1 - at;
    return true;
}

// Where each frame starts: the first place that looks like its header. `offsets` comes filled with the largest int.
extern "C" __global__ void find_frames(const u8* bytes, int num_bytes, const Row* rows, int num_rows, int* offsets) {
    int step = gridDim.x * blockDim.x;
    for (i64 i = blockIdx.x * blockDim.x + threadIdx.x; i + 1 < num_bytes; i += step) {
        int at = (int)i;
        if (bytes[at] != 0xFF || bytes[at + 1] != 0xF8) continue;
        int low = 0, high = num_rows - 1;  // the row in which it lies
        while (low < high) {
            int middle = (low + high + 1) / 2;
            if (rows[middle].start <= at) low = middle; else high = middle - 1;
        }
        const Row row = rows[low];
        Header header;
        if (at >= row.audio && at < row.stop && read_header(bytes, at, row, header))
            atomicMin(&offsets[row.first_frame + header.number], at);
    }
}

// -- bits

// Big-endian bits, from aligned words of which the next one is always on its way. Past the end there are zeros.
struct Bits {
    const u32* words;
    int at;     // word that `ahead` holds
    int last;   // word after the row's last one
    u32 ahead;
    u64 held;   // bits to come, the next one on top, zeros below them
    int have;   // how many
};

__device__ __forceinline__ u32 word_at(const Bits& bits, int at) {
    return at < bits.last ? __byte_perm(bits.words[at], 0, 0x0123) : 0;
}

__device__ Bits bits_from(const u8* bytes, int at, int stop) {
    Bits bits;
    bits.words = (const u32*)bytes;
    bits.at = at >> 2;
    bits.last = (int)(((i64)stop + 3) >> 2);
    bits.held = (u64)word_at(bits, bits.at) << (32 + (at & 3) * 8);
    bits.have = 32 - (at & 3) * 8;
    bits.ahead = word_at(bits, ++bits.at);
    return bits;
}

__device__ __forceinline__ i64 position(const Bits& bits) {
    return (i64)bits.at * 32 - bits.have;
}

// At least 33 bits held.
__device__ __forceinline__ void fill(Bits& bits) {
    if (bits.have <= 32) {
        bits.held |= (u64)bits.ahead << (32 - bits.have);
        bits.have += 32;
        bits.ahead = word_at(bits, ++bits.at);
    }
}

__device__ __forceinline__ u32 take(Bits& bits, int count) {
    u32 value = (u32)(bits.held >> 1 >> (63 - count));
    bits.held <<= count;
    bits.have -= count;
    return value;
}

__device__ __forceinline__ u32 read(Bits& bits, int count) {
    fill(bits);
    return take(bits, count);
}

__device__ __forceinline__ int read_signed(Bits& bits, int count) {
    u32 value = read(bits, count);
    return count ? (int)(value << (32 - count)) >> (32 - count) : 0;
}

// Zeros before the next one, which is passed too; -1 past the end.
__device__ __forceinline__ i64 read_unary(Bits& bits) {
    i64 zeros = 0;
    fill(bits);
    while (bits.held == 0) {
        zeros += bits.have;
        bits.have = 0;
        if (bits.at > bits.last) return -1;
        fill(bits);
    }
    int here = __clzll(bits.held);
    bits.held = bits.held << here << 1;
    bits.have -= here + 1;
    return zeros + here;
}

// -- subframes

// The residual's partitions. What has no residual is one partition of raw numbers: of no bits (constant), or of all (verbatim).
struct Residual {
    int parameter_bits;  // 4 or 5
    int share;           // samples in a partition
    int left;            // samples before the next one
    int parameter;
    int raw;             // bits of a number that is not Rice coded, -1 for Rice
};

__device__ __forceinline__ void next_partition(Bits& bits, Residual& residual) {
    residual.parameter = read(bits, residual.parameter_bits);
    residual.raw = residual.parameter == (1 << residual.parameter_bits) - 1 ? (int)read(bits, 5) : -1;
}

__device__ bool read_residual(Bits& bits, Residual& residual, int size, int order) {
    int method = read(bits, 2), partitions = read(bits, 4);
    residual.parameter_bits = 4 + method;
    residual.share = size >> partitions;
    residual.left = residual.share - order;
    if (method > 1 || residual.share << partitions != size || residual.left < 0) return false;
    next_partition(bits, residual);
    return true;
}

// One channel of a frame. Every kind of subframe runs through one loop, so that the threads of a warp stay together.
template <int HELD>
__device__ bool decode_samples(Bits& bits, int* out, u64 stride, int size, int type, int order, int width, int wasted) {
    int history[HELD], coefficients[HELD];  // the newest sample first
    int shift = 0;
#pragma unroll
    for (int i = 0; i < HELD; i++) history[i] = coefficients[i] = 0;
    for (int sample = 0; sample < order; sample++) {
        int value = read_signed(bits, width);
#pragma unroll
        for (int i = HELD - 1; i > 0; i--) history[i] = history[i - 1];
        history[0] = value;
        *out = (int)((u32)value << wasted);
        out += stride;
    }
    if (type >= 32) {
        int precision = read(bits, 4) + 1;
        shift = read_signed(bits, 5);
        if (precision == 16 || shift < 0) return false;
#pragma unroll
        for (int i = 0; i < HELD; i++) if (i < order) coefficients[i] = read_signed(bits, precision);
    } else if (order) {  // binomials; a constant predicts itself
        coefficients[0] = order;
        if (order > 1) coefficients[1] = order == 2 ? -1 : order == 3 ? -3 : -6;
        if (order > 2) coefficients[2] = order == 3 ? 1 : 4;
        if (order > 3) coefficients[3] = -1;
    }
    Residual residual = {4, size, size, 0, type == 0 ? 0 : width};
    if (type > 1 && !read_residual(bits, residual, size, order)) return false;
    for (int sample = order; sample < size; sample++) {
        if (residual.left == 0) {
            next_partition(bits, residual);
            residual.left = residual.share;
        }
        residual.left--;
        i64 sum = 0;
#pragma unroll
        for (int i = HELD - 1; i >= 0; i--) sum += (i64)coefficients[i] * history[i];
        int value;
        if (residual.raw < 0) {
            i64 high = read_unary(bits);
            if (high < 0 || high > 0xFFFFFFFFu >> residual.parameter) return false;
            u32 folded = (u32)high << residual.parameter | read(bits, residual.parameter);
            value = (int)(folded >> 1 ^ (0 - (folded & 1)));
        } else {
            value = read_signed(bits, residual.raw);
        }
        value = (int)((u32)(sum >> shift) + (u32)value);
#pragma unroll
        for (int i = HELD - 1; i > 0; i--) history[i] = history[i - 1];
        history[0] = value;
        *out = (int)((u32)value << wasted);
        out += stride;
    }
    return true;
}

__device__ bool decode_subframe(Bits& bits, int* out, u64 stride, int size, int width) {
    u32 head = read(bits, 8);
    int type = head >> 1, wasted = 0;
    if (head & 0x80) return false;
    if (head & 1) {
        i64 more = read_unary(bits);
        if (more < 0 || more + 1 >= width) return false;
        wasted = (int)more + 1;
    }
    width -= wasted;
    int order = type == 0 ? 1 : type == 1 ? 0 : type >= 32 ? type - 31 : type >= 8 && type <= 12 ? type - 8 : -1;
    if (order < 0 || order > size) return false;
    return order <= MANY ? decode_samples<MANY>(bits, out, stride, size, type, order, width, wasted)
                         : decode_samples<MOST>(bits, out, stride, size, type, order, width, wasted);
}

// The byte after the frame's last one, -1 if it is damaged.
__device__ int decode_frame(const u8* bytes, int at, const Row& row, const Header& header, int* out, u64 stride, u64 channel_stride) {
    Bits bits = bits_from(bytes, at + header.length, row.stop);
    for (int channel = 0; channel < row.num_channels; channel++) {
        bool side = header.assignment == SIDE_RIGHT ? channel == 0 : header.assignment > 7 && channel == 1;
        if (!decode_subframe(bits, out + channel * channel_stride, stride, header.size, row.bits + side)) return -1;
        if (position(bits) > (i64)row.stop * 8) return -1;
    }
    if (read(bits, bits.have & 7) != 0) return -1;  // up to the next byte
    i64 end = position(bits) / 8 + 2;
    return end <= row.stop ? (int)end : -1;
}

// Integers to `scratch`, `[channel][sample in the frame][frame]`: what a warp stores at a time lies together.
extern "C" __global__ void decode_frames(const u8* bytes, const Row* rows, const int* row_of_frame, int num_frames, const int* offsets,
                                         int longest_block, int* scratch, int* ends, int* assignments, int* status) {
    int frame = blockIdx.x * blockDim.x + threadIdx.x;
    if (frame >= num_frames) return;
    int number = row_of_frame[frame], at = offsets[frame], end = -1;
    const Row row = rows[number];
    bool first = frame == row.first_frame, last = frame + 1 == row.first_frame + row.num_frames;
    Header header;
    header.assignment = 0;
    if (at < row.stop && (!first || at == row.audio) && read_header(bytes, at, row, header))
        end = decode_frame(bytes, at, row, header, scratch + frame, num_frames, (u64)longest_block * num_frames);
    if (!last && end != offsets[frame + 1]) end = -1;  // no gap: every byte belongs to a frame
    ends[frame] = end;
    assignments[frame] = header.assignment;
    if (end < 0) status[number] = 1;
}

// -- checksums: CRC-16 is linear, so the parts of a frame are computed apart, moved to their places and added

const u32 POLYNOMIAL = 0x18005;

__device__ u32 times(u32 a, u32 b) {
    u32 product = 0;
    for (int bit = 15; bit >= 0; bit--) {
        product = (product << 1) ^ (product & 0x8000 ? POLYNOMIAL : 0);
        if (b >> bit & 1) product ^= a;
    }
    return product;
}

// `checksums` comes as zeros, and a frame's is zero again when the frame is whole.
extern "C" __global__ void check_frames(const u8* bytes, int num_frames, const int* offsets, const int* ends, u32* checksums) {
    i64 thread = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    int frame = (int)(thread / SHARES), part = (int)(thread % SHARES);
    if (frame >= num_frames || ends[frame] < 0) return;
    int end = ends[frame], share = (end - offsets[frame] + SHARES - 1) / SHARES;
    i64 start = offsets[frame] + (i64)part * share;
    if (start >= end) return;
    int stop = start + share < end ? (int)start + share : end;
    u32 crc = 0;
    for (int i = (int)start; i < stop; i++) {
        u32 top = crc >> 8 ^ bytes[i];
        crc = (crc << 8 & 0xFFFF) ^ top << 1 ^ top << 2 ^ (__popc(top) & 1 ? 0x8003 : 0);  // top * x^16
    }
    u32 power = 0x100, place = 1;  // x^8, a byte
    for (int after = end - stop; after > 0; after >>= 1) {
        if (after & 1) place = times(place, power);
        power = times(power, power);
    }
    atomicXor(&checksums[frame], times(crc, place));
}

// -- samples

// Floats to `out`, `(B, S, C)`, which comes as zeros: as libsndfile scales them. A warp writes samples of one frame, and its block reads
// whole sectors of `scratch`.
extern "C" __global__ void finish_samples(const Row* rows, const int* row_of_frame, int num_frames, const int* assignments,
                                          const u32* checksums, int longest_block, const int* scratch, float* out, int longest,
                                          int most_channels, int* status) {
    int frame = blockIdx.x * blockDim.y + threadIdx.y, sample = blockIdx.y * blockDim.x + threadIdx.x;
    if (frame >= num_frames) return;
    int number = row_of_frame[frame];
    const Row row = rows[number];
    int in_row = frame - row.first_frame;
    if (sample >= samples_of(row, in_row)) return;
    if (sample == 0 && checksums[frame] != 0) status[number] = 1;
    const int* values = scratch + (u64)sample * num_frames + frame;
    u64 channel_stride = (u64)longest_block * num_frames;
    out += ((u64)number * longest + (u64)in_row * row.block_size + sample) * most_channels;
    float scale = 1.0f / (float)(1 << (row.bits - 1));
    int assignment = assignments[frame];
    if (assignment < LEFT_SIDE) {
        for (int channel = 0; channel < row.num_channels; channel++) out[channel] = (float)values[channel * channel_stride] * scale;
        return;
    }
    u32 left = values[0], right = values[channel_stride];  // which may overflow where the file is damaged
    if (assignment == LEFT_SIDE) {
        right = left - right;
    } else if (assignment == SIDE_RIGHT) {
        left = left + right;
    } else {
        u32 sum = left << 1 | (right & 1), side = right;
        left = (int)(sum + side) >> 1;
        right = (int)(sum - side) >> 1;
    }
    out[0] = (float)(int)left * scale;
    out[1] = (float)(int)right * scale;
}
