/* layer_adam.c: AdamW for one slice of a layer, on the host, in one pass over memory.
 *
 * Two kinds of parameter, one arithmetic:
 *   split  master weights as (hi, lo), the 16-bit halves of the fp32 bits, and a bf16 gradient;
 *   fp32   master weights in fp32 and an fp32 gradient.
 * exp_avg and exp_avg_sq are fp32 in both. Everything is updated in place, for the elements [begin, end) of the arrays.
 *
 * Bits. Each element's result depends on its own inputs and the coefficients only: not on its position, the slice, the
 * number of threads, the instruction set or the compiler. So every operation is an IEEE single-precision one, fused
 * multiply-adds are written out (fmaf), and the file is compiled with -ffp-contract=off. The operations and their order
 * are those of the vector loop of PyTorch's fused CPU AdamW, with which the results agree bit for bit
 * (tests/kernels/test_layer_adam.py).
 *
 * The element function below is the only place with arithmetic. It is compiled once for each instruction set and
 * vectorised by the compiler; layer_adam.py picks a compiled version at run time. Built by native_build.py, which
 * defines LAYER_ADAM_BUILD_ID.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#ifndef LAYER_ADAM_BUILD_ID
#error "compile with native_build.py: it defines LAYER_ADAM_BUILD_ID, by which a stale library is recognised"
#endif

#define EXPORT __attribute__((visibility("default")))
#define ALWAYS_INLINE static inline __attribute__((always_inline))

/* Names the source and the flags of this build: only a library whose id is that of the source at hand is used. */
EXPORT const char *layer_adam_build_id(void) { return LAYER_ADAM_BUILD_ID; }

/* What one step needs beside the arrays, rounded to fp32 as PyTorch rounds it. Mirrored by layer_adam._Coefficients. */
typedef struct {
    float grad_scale;           /* clip coefficient */
    float decay;                /* 1 - lr * weight_decay */
    float lerp_weight;          /* exp_avg = lerp(exp_avg, grad, 1 - beta1), as base + lerp_weight * (grad - exp_avg) */
    float beta2;
    float one_minus_beta2;
    float bias_correction2_sqrt;
    float eps;
    float negative_step_size;   /* -lr / (1 - beta1^step) */
    uint32_t delta_sign;        /* 0x80000000 when the step size is 0, else 0: see updated_param */
    uint32_t lerp_from_grad;    /* which end the lerp starts from: 1 grad (beta1 <= 0.5), 0 exp_avg */
    uint32_t flush_denormals;
} adam_coefficients;

enum { ISA_PORTABLE = 0, ISA_AVX2 = 1, ISA_AVX512 = 2 };

ALWAYS_INLINE float float_of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

ALWAYS_INLINE uint32_t bits_of_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* The new parameter; exp_avg and exp_avg_sq are updated in place. */
ALWAYS_INLINE float updated_param(const adam_coefficients *c, float param, float unscaled_grad, float *exp_avg,
                                  float *exp_avg_sq) {
    const float grad = unscaled_grad * c->grad_scale;
    const float lerp_base = c->lerp_from_grad ? grad : *exp_avg;
    const float m = __builtin_fmaf(c->lerp_weight, grad - *exp_avg, lerp_base);
    const float v = __builtin_fmaf(c->one_minus_beta2 * grad, grad, *exp_avg_sq * c->beta2);
    *exp_avg = m;
    *exp_avg_sq = v;
    const float denominator = __builtin_sqrtf(v) / c->bias_correction2_sqrt + c->eps;
    const float delta = c->negative_step_size * m / denominator;
    /* A step size of 0 must change no bit, but -0.0 + 0.0 is +0.0. Forced to -0.0, the zero delta leaves every
     * parameter as it was, while a NaN delta still reaches the parameter and is noticed. */
    return param * c->decay + float_of_bits(bits_of_float(delta) | c->delta_sign);
}

ALWAYS_INLINE void update_split_element(const adam_coefficients *c, int64_t i, uint16_t *restrict hi,
                                        int16_t *restrict lo, float *restrict exp_avg, float *restrict exp_avg_sq,
                                        const uint16_t *restrict grad) {
    /* hi was rounded up when bit 15 was set, which is also lo's sign: adding the sign-extended lo takes that back. */
    const uint32_t master = ((uint32_t)hi[i] << 16) + (uint32_t)(int32_t)lo[i];
    const float fp32_grad = float_of_bits((uint32_t)grad[i] << 16);
    const float param = updated_param(c, float_of_bits(master), fp32_grad, &exp_avg[i], &exp_avg_sq[i]);
    const uint32_t updated = bits_of_float(param);
    hi[i] = (uint16_t)((updated + 0x8000u) >> 16);
    lo[i] = (int16_t)(uint16_t)updated;
}

/* One block is whole cache lines of every array. The loads of a block run PREFETCH_AHEAD elements ahead of its
 * arithmetic, which is worth about 10 % of the time where one thread alone cannot saturate memory. Prefetching past the
 * end is harmless. */
enum { BLOCK = 64, PREFETCH_AHEAD = 256, CACHE_LINE_BYTES = 64 };

ALWAYS_INLINE void prefetch_block(const void *array, int64_t first_element, int64_t element_bytes) {
    const char *address = (const char *)array + (first_element + PREFETCH_AHEAD) * element_bytes;
    for (int64_t offset = 0; offset < BLOCK * element_bytes; offset += CACHE_LINE_BYTES)
        __builtin_prefetch(address + offset);
}

ALWAYS_INLINE void update_split(const adam_coefficients *coefficients, int64_t begin, int64_t end,
                                uint16_t *restrict hi, int16_t *restrict lo, float *restrict exp_avg,
                                float *restrict exp_avg_sq, const uint16_t *restrict grad) {
    const adam_coefficients c = *coefficients; /* a local copy: the compiler need not fear that the stores change it */
    int64_t i = begin;
    for (; i + BLOCK <= end; i += BLOCK) {
        prefetch_block(hi, i, sizeof *hi);
        prefetch_block(lo, i, sizeof *lo);
        prefetch_block(exp_avg, i, sizeof *exp_avg);
        prefetch_block(exp_avg_sq, i, sizeof *exp_avg_sq);
        prefetch_block(grad, i, sizeof *grad);
#pragma omp simd
        for (int64_t j = i; j < i + BLOCK; j++) update_split_element(&c, j, hi, lo, exp_avg, exp_avg_sq, grad);
    }
    for (; i < end; i++) update_split_element(&c, i, hi, lo, exp_avg, exp_avg_sq, grad);
}

ALWAYS_INLINE void update_fp32(const adam_coefficients *coefficients, int64_t begin, int64_t end, float *restrict param,
                               float *restrict exp_avg, float *restrict exp_avg_sq, const float *restrict grad) {
    const adam_coefficients c = *coefficients;
    int64_t i = begin;
    for (; i + BLOCK <= end; i += BLOCK) {
        prefetch_block(param, i, sizeof *param);
        prefetch_block(exp_avg, i, sizeof *exp_avg);
        prefetch_block(exp_avg_sq, i, sizeof *exp_avg_sq);
        prefetch_block(grad, i, sizeof *grad);
#pragma omp simd
        for (int64_t j = i; j < i + BLOCK; j++)
            param[j] = updated_param(&c, param[j], grad[j], &exp_avg[j], &exp_avg_sq[j]);
    }
    for (; i < end; i++) param[i] = updated_param(&c, param[i], grad[i], &exp_avg[i], &exp_avg_sq[i]);
}

#define COMMON_PARAMETERS const adam_coefficients *c, int64_t begin, int64_t end
#define SPLIT_PARAMETERS                                                                                     \
    COMMON_PARAMETERS, uint16_t *hi, int16_t *lo, float *exp_avg, float *exp_avg_sq, const uint16_t *grad
#define SPLIT_ARGUMENTS c, begin, end, hi, lo, exp_avg, exp_avg_sq, grad
#define FP32_PARAMETERS COMMON_PARAMETERS, float *param, float *exp_avg, float *exp_avg_sq, const float *grad
#define FP32_ARGUMENTS c, begin, end, param, exp_avg, exp_avg_sq, grad

/* noinline: the arithmetic must stay between the two changes of denormal mode around its call. */
#define COMPILE_FOR(isa, target)                                                                             \
    target static void update_split_##isa(SPLIT_PARAMETERS) { update_split(SPLIT_ARGUMENTS); }               \
    target static void update_fp32_##isa(FP32_PARAMETERS) { update_fp32(FP32_ARGUMENTS); }

COMPILE_FOR(portable, __attribute__((noinline)))
#if defined(__x86_64__)
COMPILE_FOR(avx2, __attribute__((noinline, target("avx2,fma"))))
COMPILE_FOR(avx512, __attribute__((noinline, target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"))))
#endif

/* Does this CPU run that version? */
EXPORT int layer_adam_isa_supported(int isa) {
    if (isa == ISA_PORTABLE) return 1;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (isa == ISA_AVX2) return avx2;
    if (isa == ISA_AVX512)
        return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#endif
    return 0;
}

/* Denormals are kept or flushed as the coefficients say. The calling thread's own mode neither matters nor changes. */
#if defined(__x86_64__)
enum { FLUSH_RESULTS_AND_OPERANDS = 0x8040 }; /* FTZ and DAZ of MXCSR */
ALWAYS_INLINE unsigned enter_denormal_mode(const adam_coefficients *c) {
    const unsigned callers_mode = _mm_getcsr();
    const unsigned keep = callers_mode & ~(unsigned)FLUSH_RESULTS_AND_OPERANDS;
    _mm_setcsr(c->flush_denormals ? keep | FLUSH_RESULTS_AND_OPERANDS : keep);
    return callers_mode;
}
ALWAYS_INLINE void leave_denormal_mode(unsigned callers_mode) { _mm_setcsr(callers_mode); }
EXPORT int layer_adam_can_flush_denormals(void) { return 1; }
#else
ALWAYS_INLINE unsigned enter_denormal_mode(const adam_coefficients *c) {
    (void)c;
    return 0;
}
ALWAYS_INLINE void leave_denormal_mode(unsigned callers_mode) { (void)callers_mode; }
EXPORT int layer_adam_can_flush_denormals(void) { return 0; }
#endif

/* Update the elements of `count` segments, each a (begin, end) pair in `segments`. Every pointer is to element 0 of its
 * array; isa must be one that the CPU supports. A whole slice is one segment, rows of an embedding are many. */
EXPORT void layer_adam_split(int isa, const adam_coefficients *c, const int64_t *segments, int64_t count, uint16_t *hi,
                             int16_t *lo, float *exp_avg, float *exp_avg_sq, const uint16_t *grad) {
    const unsigned callers_mode = enter_denormal_mode(c);
    for (int64_t s = 0; s < count; s++) {
        const int64_t begin = segments[2 * s], end = segments[2 * s + 1];
        switch (isa) {
#if defined(__x86_64__)
        case ISA_AVX512: update_split_avx512(SPLIT_ARGUMENTS); break;
        case ISA_AVX2: update_split_avx2(SPLIT_ARGUMENTS); break;
#endif
        default: update_split_portable(SPLIT_ARGUMENTS);
        }
    }
    leave_denormal_mode(callers_mode);
}

EXPORT void layer_adam_fp32(int isa, const adam_coefficients *c, const int64_t *segments, int64_t count, float *param,
                            float *exp_avg, float *exp_avg_sq, const float *grad) {
    const unsigned callers_mode = enter_denormal_mode(c);
    for (int64_t s = 0; s < count; s++) {
        const int64_t begin = segments[2 * s], end = segments[2 * s + 1];
        switch (isa) {
#if defined(__x86_64__)
        case ISA_AVX512: update_fp32_avx512(FP32_ARGUMENTS); break;
        case ISA_AVX2: update_fp32_avx2(FP32_ARGUMENTS); break;
#endif
        default: update_fp32_portable(FP32_ARGUMENTS);
        }
    }
    leave_denormal_mode(callers_mode);
}
