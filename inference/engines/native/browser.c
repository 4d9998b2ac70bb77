/* Word embeddings for a browser, which travel in half the bytes. Compiled by deployment/compile_kernels.py --browser. */
#include "model.h"

#ifdef __wasm_simd128__
#include <wasm_simd128.h>

/* Rounds to even; float16 has 13 bits less. A multiplication by 2^-112 gives a float the exponent of a float16, also
 * that of the small ones which have no leading one. */
INLINE v128_t to_half_4(v128_t x) {
    const v128_t size = wasm_f32x4_mul(wasm_f32x4_abs(x), wasm_f32x4_splat(0x1p-112f));
    const v128_t odd = wasm_v128_and(wasm_u32x4_shr(size, 13), wasm_i32x4_splat(1));
    const v128_t half = wasm_u32x4_shr(wasm_i32x4_add(size, wasm_i32x4_add(odd, wasm_i32x4_splat(0xfff))), 13);
    return wasm_v128_or(half, wasm_v128_and(wasm_u32x4_shr(x, 16), wasm_i32x4_splat(0x8000)));
}

/* Turns int8 (rows, width) into float16 in place: the bytes are in the second half of `words`, so each is read before
 * its place is written. `scale` has one float for each row; width is a multiple of 16. */
void widen_words(uint16_t *words, const float *scale, int32_t rows, int32_t width) {
    const int8_t *byte = (const int8_t *)words + (size_t)rows * width;
    for (int32_t row = 0; row < rows; row++) {
        const v128_t factor = wasm_f32x4_splat(scale[row]);
        for (int32_t i = 0; i < width; i += 8, byte += 8, words += 8) {
            const v128_t x = wasm_i16x8_load8x8(byte);
            const v128_t low = wasm_f32x4_convert_i32x4(wasm_i32x4_extend_low_i16x8(x));
            const v128_t high = wasm_f32x4_convert_i32x4(wasm_i32x4_extend_high_i16x8(x));
            const v128_t first = to_half_4(wasm_f32x4_mul(low, factor)), second = to_half_4(wasm_f32x4_mul(high, factor));
            wasm_v128_store(words, wasm_u16x8_narrow_i32x4(first, second));
        }
    }
}
#endif
