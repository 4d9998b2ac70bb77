/* Runs a model that another machine has packed: forward_image IMAGE BATCH prints, for every instruction set of this
 * processor, its name and the logits' bits.
 *
 * IMAGE holds the count of its pointers, the offset of each, its own length, and the structures of model.h and all
 * arrays as they lie in memory, with offsets in place of addresses, of this processor's size. BATCH holds the count of
 * texts and of ids, starts and ids. */
#include <stdio.h>
#include <stdlib.h>

#include "model.h"

struct Pool *open_pool(const Model *, int32_t helpers, const char *instructions);
Session *open_session(struct Pool *);
int32_t forward(Session *, const int32_t *ids, const int32_t *starts, int32_t texts, int32_t threads, float *logits);
const char *instruction_set(int32_t index);

static void *take(FILE *file, size_t bytes) {
    void *memory = aligned_alloc(64, (bytes + 127) / 64 * 64);
    if (!memory || fread(memory, 1, bytes, file) != bytes) exit(2);
    return memory;
}

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    FILE *file = fopen(argv[1], "rb");
    if (!file) return 2;
    const uint64_t pointers = *(uint64_t *)take(file, 8);
    const uint64_t *offsets = take(file, 8 * pointers);
    char *image = take(file, *(uint64_t *)take(file, 8));
    for (uint64_t i = 0; i < pointers; i++) *(char **)(image + offsets[i]) = image + *(uintptr_t *)(image + offsets[i]);
    const Model *model = (const Model *)image;

    if (!(file = fopen(argv[2], "rb"))) return 2;
    const int32_t *counts = take(file, 8);
    const int32_t *starts = take(file, 4 * (size_t)(counts[0] + 1)), *ids = take(file, 4 * (size_t)counts[1]);
    const int32_t size = counts[0] * model->labels;
    float *logits = malloc(sizeof(float) * size);
    const char *name;
    for (int i = 0; (name = instruction_set(i)); i++)
        for (int threads = 1; threads <= 2; threads++) {
            Session *session = open_session(open_pool(model, threads - 1, name));
            if (forward(session, ids, starts, counts[0], threads, logits)) return 1;
            printf("%s", name);
            for (int32_t j = 0; j < size; j++) printf(" %08x", ((uint32_t *)logits)[j]);
            printf("\n");
        }
    return 0;
}
