/* Hides from a process and its children what x86-64 has beyond AVX2, so that a newer processor stands for an older one,
 * for all libraries alike: preloaded, it has CPUID fault (Linux: arch_prctl, processors with cpuid_fault) and answers it
 * in the handler, without the bits of AVX-512, AVX-VNNI and AMX. */
#define _GNU_SOURCE
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

enum { ARCH_SET_CPUID = 0x1012 };

#define BITS_2(A, B) (1u << (A) | 1u << (B))
#define BITS_4(A, B, C, D) (BITS_2(A, B) | BITS_2(C, D))
/* Leaf 7, subleaf 0: AVX-512 F, DQ, IFMA, PF, ER, CD, BW, VL; VBMI, VBMI2, VNNI, BITALG, VPOPCNTDQ; and in EDX 4VNNIW,
 * 4FMAPS, VP2INTERSECT, FP16, AMX-BF16, -TILE and -INT8. */
static const uint32_t leaf_7_ebx = BITS_4(16, 17, 21, 26) | BITS_4(27, 28, 30, 31);
static const uint32_t leaf_7_ecx = BITS_4(1, 6, 11, 12) | 1u << 14;
static const uint32_t leaf_7_edx = BITS_4(2, 3, 8, 22) | BITS_2(23, 24) | 1u << 25;
/* Subleaf 1: AVX-VNNI, AVX512-BF16, AMX-FP16, AVX-IFMA; and in EDX AVX-VNNI-INT8 and -INT16, AVX-NE-CONVERT, AVX10. */
static const uint32_t leaf_7_1_eax = BITS_4(4, 5, 21, 23);
static const uint32_t leaf_7_1_edx = BITS_4(4, 5, 10, 19);

static void answer_cpuid(int number, siginfo_t *info, void *context) {
    (void)info;
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    const uint8_t *instruction = (const uint8_t *)registers[REG_RIP];
    if (instruction[0] != 0x0f || instruction[1] != 0xa2) { /* a true fault: let it come again and end the process */
        signal(number, SIG_DFL);
        return;
    }
    const uint32_t leaf = (uint32_t)registers[REG_RAX], subleaf = (uint32_t)registers[REG_RCX];
    uint32_t a = leaf, b, c = subleaf, d;
    syscall(SYS_arch_prctl, ARCH_SET_CPUID, 1);
    __asm__ volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    syscall(SYS_arch_prctl, ARCH_SET_CPUID, 0);
    if (leaf == 7 && subleaf == 0) b &= ~leaf_7_ebx, c &= ~leaf_7_ecx, d &= ~leaf_7_edx;
    if (leaf == 7 && subleaf == 1) a &= ~leaf_7_1_eax, d &= ~leaf_7_1_edx;
    registers[REG_RAX] = a, registers[REG_RBX] = b, registers[REG_RCX] = c, registers[REG_RDX] = d;
    registers[REG_RIP] += 2;
}

__attribute__((constructor)) static void hide(void) {
    struct sigaction action = {.sa_sigaction = answer_cpuid, .sa_flags = SA_SIGINFO | SA_NODEFER};
    sigaction(SIGSEGV, &action, NULL);
    if (syscall(SYS_arch_prctl, ARCH_SET_CPUID, 0)) {
        fprintf(stderr, "error: this processor or kernel cannot hide instructions (cpuid_fault)\n");
        _exit(2);
    }
}
