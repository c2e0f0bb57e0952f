/* mori's poller calls sched_yield without end until there is a first connection, which takes a whole core for each idle rank.
 * The file is left as it is; in memory, the one slot through which that library reaches sched_yield is pointed at a short sleep.
 */
#define _GNU_SOURCE
#include <link.h>
#include <string.h>
#include <unistd.h>

static int nap(void) { return usleep(2000); }

static int calm(struct dl_phdr_info *object, size_t size, void *unused) {
    (void)size, (void)unused;
    if (!strstr(object->dlpi_name, "/libmori_io.so")) return 0;
    const ElfW(Dyn) *entry = 0;
    for (int i = 0; i < object->dlpi_phnum; i++)
        if (object->dlpi_phdr[i].p_type == PT_DYNAMIC) entry = (const void *)(object->dlpi_addr + object->dlpi_phdr[i].p_vaddr);
    const ElfW(Rela) *calls = 0;
    const ElfW(Sym) *symbols = 0;
    const char *names = 0;
    size_t bytes = 0;
    for (; entry && entry->d_tag != DT_NULL; entry++) {
        if (entry->d_tag == DT_JMPREL) calls = (const void *)entry->d_un.d_ptr;
        if (entry->d_tag == DT_PLTRELSZ) bytes = entry->d_un.d_val;
        if (entry->d_tag == DT_SYMTAB) symbols = (const void *)entry->d_un.d_ptr;
        if (entry->d_tag == DT_STRTAB) names = (const void *)entry->d_un.d_ptr;
    }
    if (!calls || !symbols || !names) return 1;
    for (size_t i = 0; i < bytes / sizeof *calls; i++)
        if (!strcmp(names + symbols[ELF64_R_SYM(calls[i].r_info)].st_name, "sched_yield"))
            *(int (**)(void))(object->dlpi_addr + calls[i].r_offset) = nap;
    return 1;
}

void calm_poller(void) { dl_iterate_phdr(calm, 0); }
