// Tail steps on uint8 images, in place: tables of levels, warps, saturation, hue, sharpness; and mirroring and erasing of any values.
//
// x holds images of `channels` x `height` x `width` values, dense, in whichever order: neighbours in a row lie `pixel_step` values
// apart, channels `channel_step`. A launch works on some images; `rows` says which, and other arrays have an entry for each of them.
// The arithmetic is that of `levels.py`, `pillow.py`, `color.py` and `geometry.py`, whose names it has. Compiled without contraction:
// where a product and a sum round once, `fma` says so. Any size of blocks and grids is right. Compiles without any header (NVRTC).
//
// Over 300 lines: NVRTC compiles one file.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

const int LEVELS = 256;

#define EACH(name, count) \
    for (int name = blockIdx.x * blockDim.x + threadIdx.x; name < (count); name += gridDim.x * blockDim.x)

__device__ __forceinline__ float within(float value, float high) {
    return value < 0 ? 0 : value > high ? high : value;
}

__device__ __forceinline__ u8 level(float value) { return (u8)(int)within(value, 255); }

// -- gray

__device__ __forceinline__ int gray_pil(int red, int green, int blue) {
    return (red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16;
}

__device__ __forceinline__ int gray_tensor(int red, int green, int blue) {
    return (int)fmaf((float)blue, 0.114f, fmaf((float)green, 0.587f, (float)red * 0.2989f));
}

__device__ __forceinline__ int gray(const u8* pixel, int channels, int channel_step, int pil) {
    if (channels == 1) return pixel[0];
    int red = pixel[0], green = pixel[channel_step], blue = pixel[2 * channel_step];
    return pil ? gray_pil(red, green, blue) : gray_tensor(red, green, blue);
}

// Blends `x` with `base`: Pillow rounds twice, torchvision's tensors once.
__device__ __forceinline__ u8 blend(float base, float x, float factor, float rest, int pil) {
    return level(pil ? (x - base) * factor + base : fmaf(base, rest, x * factor));
}

// -- levels

// An image whose table depends on its pixels.
struct Measured {
    int row;
    int table;  // the first of its tables, one a channel
    int call;
    float factor;
    float rest;  // 1 - factor, rounded by itself
};

const int CONTRAST_PIL = 0, CONTRAST = 1, AUTOCONTRAST_PIL = 2, AUTOCONTRAST = 3, EQUALIZE = 4;

__device__ u8 stretched(int value, int low, int high, int pil) {
    if (low == high) return (u8)value;
    if (!pil) return level(((float)value - (float)low) / ((float)(high - low) * (float)(1.0 / 255)));
    double scale = 255.0 / (double)(high - low);
    double moved = (double)value * scale - (double)low * scale;
    return (u8)(int)(moved < 0 ? 0 : moved > 255 ? 255 : moved);
}

// A block makes the table of one channel (blockIdx.y) of one entry (blockIdx.x); for a contrast, the first makes all.
extern "C" __global__ void __launch_bounds__(1024) measure(
    const u8* x, const Measured* entries, u8* tables, int channels, int pixels, int channel_step, int pixel_step
) {
    __shared__ u32 histogram[LEVELS];
    __shared__ u32 before[LEVELS];
    __shared__ int low, high;
    __shared__ u64 total;
    Measured entry = entries[blockIdx.x];
    int channel = blockIdx.y;
    const u8* image = x + (size_t)entry.row * channels * pixels;
    u8* table = tables + (size_t)(entry.table + channel) * LEVELS;
    if (entry.call <= CONTRAST) {
        if (channel > 0) return;
        int pil = entry.call == CONTRAST_PIL;
        if (threadIdx.x == 0) total = 0;
        __syncthreads();
        u64 sum = 0;
        for (int p = threadIdx.x; p < pixels; p += blockDim.x)
            sum += gray(image + (size_t)p * pixel_step, channels, channel_step, pil);
        atomicAdd(&total, sum);
        __syncthreads();
        float mean = pil ? (float)floor((double)total / pixels + 0.5) : (float)total / (float)pixels;
        for (int value = threadIdx.x; value < LEVELS; value += blockDim.x) {
            u8 out = blend(mean, (float)value, entry.factor, entry.rest, pil);
            for (int c = 0; c < channels; c++) table[c * LEVELS + value] = out;
        }
        return;
    }
    for (int value = threadIdx.x; value < LEVELS; value += blockDim.x) histogram[value] = 0;
    __syncthreads();
    const u8* plane = image + (size_t)channel * channel_step;
    for (int p = threadIdx.x; p < pixels; p += blockDim.x) atomicAdd(&histogram[plane[(size_t)p * pixel_step]], 1u);
    __syncthreads();
    if (threadIdx.x == 0) {
        u32 sum = 0;
        low = high = -1;
        for (int value = 0; value < LEVELS; value++) {
            before[value] = sum;
            sum += histogram[value];
            if (histogram[value]) {
                high = value;
                if (low < 0) low = value;
            }
        }
    }
    __syncthreads();
    if (entry.call != EQUALIZE) {
        for (int value = threadIdx.x; value < LEVELS; value += blockDim.x)
            table[value] = stretched(value, low, high, entry.call == AUTOCONTRAST_PIL);
        return;
    }
    u32 step = ((u32)pixels - histogram[high]) / 255;
    for (int value = threadIdx.x; value < LEVELS; value += blockDim.x) {
        u32 place = step ? (before[value] + step / 2) / step : value;
        table[value] = (u8)(place > 255 ? 255 : place);
    }
}

// Of a row: its first table, and how many tables further its next channel's is.
struct LookUp {
    int table;
    int step;
};

extern "C" __global__ void look_up(
    u8* x, const int* rows, const LookUp* entries, const u8* tables, int channels, int pixels, int channel_step, int pixel_step
) {
    LookUp entry = entries[blockIdx.y];
    u8* image = x + (size_t)rows[blockIdx.y] * channels * pixels;
    const u8* table = tables + (size_t)entry.table * LEVELS;
    EACH(p, pixels)
        for (int c = 0; c < channels; c++) {
            u8* value = image + (size_t)p * pixel_step + (size_t)c * channel_step;
            *value = table[c * entry.step * LEVELS + *value];
        }
}

// -- saturation and hue

struct Factor {
    float factor;
    float rest;
};

extern "C" __global__ void saturation(
    u8* x, const int* rows, const Factor* factors, int pil, int pixels, int channel_step, int pixel_step
) {
    u8* image = x + (size_t)rows[blockIdx.y] * 3 * pixels;
    Factor by = factors[blockIdx.y];
    EACH(p, pixels) {
        u8* pixel = image + (size_t)p * pixel_step;
        float base = (float)gray(pixel, 3, channel_step, pil);
        for (int c = 0; c < 3; c++) {
            u8* value = pixel + (size_t)c * channel_step;
            *value = blend(base, (float)*value, by.factor, by.rest, pil);
        }
    }
}

__device__ __forceinline__ void colour(int sector, float value, float low, float falling, float rising, float* rgb) {
    rgb[0] = sector == 0 || sector == 5 ? value : sector == 1 ? falling : sector == 4 ? rising : low;
    rgb[1] = sector == 1 || sector == 2 ? value : sector == 3 ? falling : sector == 0 ? rising : low;
    rgb[2] = sector == 3 || sector == 4 ? value : sector == 5 ? falling : sector == 2 ? rising : low;
}

__device__ __forceinline__ float whole(double scaled, double value) {
    double rounded = floor(scaled * value + 0.5);
    return (float)(rounded < 0 ? 0 : rounded > 255 ? 255 : rounded);
}

__device__ void turn_hue_pil(const u8* in, int shift, float* rgb) {
    float red = in[0], green = in[1], blue = in[2];
    float high = fmaxf(red, fmaxf(green, blue)), low = fminf(red, fminf(green, blue));
    if (high == low) {
        rgb[0] = rgb[1] = rgb[2] = high;
        return;
    }
    float spread = high - low;
    float to_red = (high - red) / spread, to_green = (high - green) / spread, to_blue = (high - blue) / spread;
    float sixths = red == high     ? to_blue - to_green
                   : green == high ? (float)((double)to_red + 2.0 - (double)to_blue)
                                   : (float)((double)to_green + 4.0 - (double)to_red);
    float hue = (float)fmod((double)sixths / 6.0 + 1.0, 1.0);
    int turned = ((int)((double)hue * 255.0) + shift) % 256;
    int saturation = (int)((double)(spread / high) * 255.0);
    if (saturation == 0) {
        rgb[0] = rgb[1] = rgb[2] = high;
        return;
    }
    double at = (double)turned * 6.0 / 255.0;
    double sector = floor(at);
    double part = (double)(float)(at - sector), share = (double)(float)((double)saturation / 255.0), bright = high;
    colour((int)sector % 6, high, whole(1.0 - share, bright), whole(1.0 - share * part, bright),
           whole(1.0 - share * (1.0 - part), bright), rgb);
}

__device__ void turn_hue_tensor(const u8* in, float shift, float* rgb) {
    const float unit = (float)(1.0 / 255);
    float red = in[0] * unit, green = in[1] * unit, blue = in[2] * unit;
    float high = fmaxf(red, fmaxf(green, blue)), low = fminf(red, fminf(green, blue));
    float spread = high - low, divisor = high == low ? 1.0f : spread;
    float saturation = spread / (high == low ? 1.0f : high);
    float to_red = (high - red) / divisor, to_green = (high - green) / divisor, to_blue = (high - blue) / divisor;
    float sixths = high == red     ? to_blue - to_green
                   : high == green ? to_red + 2.0f - to_blue
                                   : to_green + 4.0f - to_red;
    float hue = fmodf(sixths * (float)(1.0 / 6) + 1.0f, 1.0f) + shift;
    hue = fmodf(hue, 1.0f);
    if (hue < 0) hue += 1.0f;
    float at = hue * 6.0f, sector = floorf(at);
    float partial = (at - sector) * saturation, rest = 1.0f - saturation;
    colour((int)sector % 6, high, within(rest * high, 1), within((1.0f - partial) * high, 1),
           within((partial + rest) * high, 1), rgb);
    for (int c = 0; c < 3; c++) rgb[c] = (float)(int)(rgb[c] * (float)(255.0 + 1.0 - 1e-3));
}

// A shift is a whole number of Pillow's 256 hues, or a share of the circle.
extern "C" __global__ void hue(
    u8* x, const int* rows, const float* shifts, int pil, int pixels, int channel_step, int pixel_step
) {
    u8* image = x + (size_t)rows[blockIdx.y] * 3 * pixels;
    float shift = shifts[blockIdx.y];
    EACH(p, pixels) {
        u8* pixel = image + (size_t)p * pixel_step;
        u8 in[3] = {pixel[0], pixel[channel_step], pixel[2 * channel_step]};
        float rgb[3];
        if (pil) turn_hue_pil(in, (int)shift, rgb);
        else turn_hue_tensor(in, shift, rgb);
        for (int c = 0; c < 3; c++) pixel[(size_t)c * channel_step] = level(rgb[c]);
    }
}

// -- what looks at other pixels: into images of their own, which `put_back` puts in their rows' place

extern "C" __global__ void put_back(u8* x, const int* rows, const u8* images, int words, int tail_bytes) {
    size_t size = (size_t)words * 8 + tail_bytes;
    u8* to = x + rows[blockIdx.y] * size;
    const u8* from = images + blockIdx.y * size;
    EACH(i, words) ((u64*)to)[i] = ((const u64*)from)[i];
    EACH(i, tail_bytes) to[(size_t)words * 8 + i] = from[(size_t)words * 8 + i];
}

extern "C" __global__ void sharpness(
    const u8* x, const int* rows, const float* rests, u8* out, int channels, int height, int width, int channel_step, int pixel_step
) {
    size_t size = (size_t)channels * height * width;
    const u8* image = x + rows[blockIdx.y] * size;
    float rest = rests[blockIdx.y];
    int line = width * pixel_step;
    EACH(p, height * width) {
        int y = p / width, left = p % width;
        bool inner = y > 0 && y < height - 1 && left > 0 && left < width - 1;
        for (int c = 0; c < channels; c++) {
            size_t at = (size_t)p * pixel_step + (size_t)c * channel_step;
            u8 value = image[at];
            if (inner) {
                const u8* middle = image + at;
                int sum = 0;
                for (int dy = -1; dy <= 1; dy++)
                    for (int dx = -1; dx <= 1; dx++) sum += middle[dy * line + dx * pixel_step];
                float blurred = rintf(fmaf((float)value, (float)(4.0 / 13), (float)sum * (float)(1.0 / 13)));
                value = level(fmaf(blurred - (float)value, rest, (float)value));
            }
            out[blockIdx.y * size + at] = value;
        }
    }
}

// Positions in the source as Pillow counts them for nearest pixels: 65536ths.
struct FixedPoint {
    i64 a, b, c, d, e, f;
};

__device__ __forceinline__ u8 clear(float fill) { return (u8)(int)rintf(fill); }

extern "C" __global__ void warp_pil_nearest(
    const u8* x, const int* rows, const FixedPoint* matrices, const float* fill, u8* out,
    int channels, int height, int width, int channel_step, int pixel_step
) {
    size_t size = (size_t)channels * height * width;
    const u8* image = x + rows[blockIdx.y] * size;
    FixedPoint m = matrices[blockIdx.y];
    EACH(p, height * width) {
        int y = p / width, left = p % width;
        i64 column = (m.c + m.a * left + m.b * y) >> 16, line = (m.f + m.d * left + m.e * y) >> 16;
        bool inside = column >= 0 && column < width && line >= 0 && line < height;
        const u8* from = image + (inside ? (line * width + column) * pixel_step : 0);
        for (int c = 0; c < channels; c++)
            out[blockIdx.y * size + (size_t)p * pixel_step + (size_t)c * channel_step] =
                inside ? from[(size_t)c * channel_step] : clear(fill[c]);
    }
}

struct Matrix {
    double a, b, c, d, e, f;
};

__device__ __forceinline__ double between(double a, double b, double share) { return a + (b - a) * share; }

extern "C" __global__ void warp_pil_bilinear(
    const u8* x, const int* rows, const Matrix* matrices, const float* fill, u8* out,
    int channels, int height, int width, int channel_step, int pixel_step
) {
    size_t size = (size_t)channels * height * width;
    const u8* image = x + rows[blockIdx.y] * size;
    Matrix m = matrices[blockIdx.y];
    EACH(p, height * width) {
        double to_x = p % width + 0.5, to_y = p / width + 0.5;
        double from_x = to_x * m.a + to_y * m.b + m.c, from_y = to_x * m.d + to_y * m.e + m.f;
        bool inside = from_x >= 0 && from_x < width && from_y >= 0 && from_y < height;
        double corner_x = floor(from_x - 0.5), corner_y = floor(from_y - 0.5);
        double dx = from_x - 0.5 - corner_x, dy = from_y - 0.5 - corner_y;
        int left = inside ? (int)corner_x : 0, top = inside ? (int)corner_y : 0;
        int right = left + 1 < width ? left + 1 : width - 1, bottom = top + 1 < height ? top + 1 : height - 1;
        left = left < 0 ? 0 : left;
        top = top < 0 ? 0 : top;
        for (int c = 0; c < channels; c++) {
            const u8* plane = image + (size_t)c * channel_step;
            u8 value;
            if (inside) {
                const u8 *upper = plane + (size_t)top * width * pixel_step, *lower = plane + (size_t)bottom * width * pixel_step;
                double above = between(upper[left * pixel_step], upper[right * pixel_step], dx);
                double below = between(lower[left * pixel_step], lower[right * pixel_step], dx);
                value = (u8)(int)between(above, below, dy);
            } else {
                value = clear(fill[c]);
            }
            out[blockIdx.y * size + (size_t)p * pixel_step + (size_t)c * channel_step] = value;
        }
    }
}

// Positions in half images about the middle, as torch's grid_sample has them.
struct Grid {
    float a, b, c, d, e, f;
};

__device__ __forceinline__ float source(float along, float down, float a, float b, float c, int size) {
    float grid = fmaf(down, b, along * a) + c;
    return fmaf(grid + 1.0f, (float)size, -1.0f) / 2.0f;
}

extern "C" __global__ void warp_nearest(
    const u8* x, const int* rows, const Grid* matrices, const float* fill, u8* out,
    int channels, int height, int width, int channel_step, int pixel_step
) {
    size_t size = (size_t)channels * height * width;
    const u8* image = x + rows[blockIdx.y] * size;
    Grid m = matrices[blockIdx.y];
    EACH(p, height * width) {
        float along = p % width - (width - 1) * 0.5f, down = p / width - (height - 1) * 0.5f;
        float column = rintf(source(along, down, m.a, m.b, m.c, width));
        float line = rintf(source(along, down, m.d, m.e, m.f, height));
        bool inside = column >= 0 && column < width && line >= 0 && line < height;
        const u8* from = image + (inside ? ((size_t)line * width + (size_t)column) * pixel_step : 0);
        for (int c = 0; c < channels; c++)
            out[blockIdx.y * size + (size_t)p * pixel_step + (size_t)c * channel_step] =
                inside ? from[(size_t)c * channel_step] : clear(fill[c]);
    }
}

// `filled` 0: what lies outside is black and is mixed in, without a mask.
extern "C" __global__ void warp_bilinear(
    const u8* x, const int* rows, const Grid* matrices, const float* fill, u8* out,
    int channels, int height, int width, int channel_step, int pixel_step, int filled
) {
    size_t size = (size_t)channels * height * width;
    const u8* image = x + rows[blockIdx.y] * size;
    Grid m = matrices[blockIdx.y];
    EACH(p, height * width) {
        float along = p % width - (width - 1) * 0.5f, down = p / width - (height - 1) * 0.5f;
        float from_x = source(along, down, m.a, m.b, m.c, width), from_y = source(along, down, m.d, m.e, m.f, height);
        from_x = from_x < -2 ? -2 : from_x > width + 1 ? width + 1 : from_x;  // as far outside, and an integer
        from_y = from_y < -2 ? -2 : from_y > height + 1 ? height + 1 : from_y;
        int left = (int)floorf(from_x), top = (int)floorf(from_y);
        float weights[4] = {
            (left + 1 - from_x) * (top + 1 - from_y), (from_x - left) * (top + 1 - from_y),
            (left + 1 - from_x) * (from_y - top), (from_x - left) * (from_y - top)
        };
        size_t places[4];
        float mask = 0;
        for (int corner = 0; corner < 4; corner++) {
            int column = left + corner % 2, line = top + corner / 2;
            bool inside = column >= 0 && column < width && line >= 0 && line < height;
            places[corner] = inside ? ((size_t)line * width + column) * pixel_step : 0;
            if (!inside) weights[corner] = 0;
            mask += weights[corner];
        }
        for (int c = 0; c < channels; c++) {
            const u8* plane = image + (size_t)c * channel_step;
            float value = 0;
            for (int corner = 0; corner < 4; corner++) value = fmaf(plane[places[corner]], weights[corner], value);
            if (filled) value = (value - fill[c]) * mask + fill[c];
            out[blockIdx.y * size + (size_t)p * pixel_step + (size_t)c * channel_step] = level(rintf(value));
        }
    }
}

// -- values of 1, 2 or 4 bytes, whatever they mean

template <class T> __device__ void swap(T* images, const int* rows, int channels, int height, int width, int channel_step, int pixel_step, int down) {
    T* image = images + (size_t)rows[blockIdx.y] * channels * height * width;
    int lines = down ? height / 2 : height, columns = down ? width : width / 2;
    EACH(i, lines * columns) {
        int y = i / columns, left = i % columns;
        int other_y = down ? height - 1 - y : y, other_left = down ? left : width - 1 - left;
        size_t one = ((size_t)y * width + left) * pixel_step, two = ((size_t)other_y * width + other_left) * pixel_step;
        for (int c = 0; c < channels; c++) {
            T kept = image[one + (size_t)c * channel_step];
            image[one + (size_t)c * channel_step] = image[two + (size_t)c * channel_step];
            image[two + (size_t)c * channel_step] = kept;
        }
    }
}

extern "C" __global__ void flip(
    u8* x, const int* rows, int channels, int height, int width, int channel_step, int pixel_step, int down, int bytes
) {
    if (bytes == 1) swap(x, rows, channels, height, width, channel_step, pixel_step, down);
    else if (bytes == 2) swap((u16*)x, rows, channels, height, width, channel_step, pixel_step, down);
    else swap((u32*)x, rows, channels, height, width, channel_step, pixel_step, down);
}

struct Window {
    int top, left, height, width;
};

template <class T> __device__ void paint(T* images, const int* rows, const Window* windows, const T* colours, int channels, int pixels, int width, int channel_step, int pixel_step) {
    T* image = images + (size_t)rows[blockIdx.y] * channels * pixels;
    Window window = windows[blockIdx.y];
    EACH(i, window.height * window.width) {
        size_t at = ((size_t)(window.top + i / window.width) * width + window.left + i % window.width) * pixel_step;
        for (int c = 0; c < channels; c++) image[at + (size_t)c * channel_step] = colours[blockIdx.y * channels + c];
    }
}

// Windows lie inside of their images.
extern "C" __global__ void erase(
    u8* x, const int* rows, const Window* windows, const u8* colours,
    int channels, int pixels, int width, int channel_step, int pixel_step, int bytes
) {
    if (bytes == 1) paint(x, rows, windows, colours, channels, pixels, width, channel_step, pixel_step);
    else if (bytes == 2) paint((u16*)x, rows, windows, (const u16*)colours, channels, pixels, width, channel_step, pixel_step);
    else paint((u32*)x, rows, windows, (const u32*)colours, channels, pixels, width, channel_step, pixel_step);
}
