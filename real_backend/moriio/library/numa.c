/* libnuma where the system has none: there is one node, and nothing is bound to it. Apart from absent.c, as a real libnuma must
 * not be shadowed for others in the process. */
int numa_available(void) { return -1; }
int numa_max_node(void) { return 0; }
long long numa_node_size64(int node, long long *rest) { return (void)node, rest ? (*rest = 0) : 0; }
void *numa_bitmask_alloc(unsigned bits) { return (void)bits, (void *)0; }
void numa_bitmask_free(void *mask) { (void)mask; }
void *numa_bitmask_setbit(void *mask, unsigned bit) { return (void)bit, mask; }
long mbind(void *start, unsigned long bytes, int mode, const unsigned long *nodes, unsigned long most, unsigned flags) {
    return (void)start, (void)bytes, (void)mode, (void)nodes, (void)most, (void)flags, 0;
}
