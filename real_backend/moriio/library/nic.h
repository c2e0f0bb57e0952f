/* A network card in software: what verbs.c, its driver, shares with nic.c, the card itself. */
#pragma once
#include <pthread.h>

#include "verbs_abi.h"

#define MOST_REGIONS 65536u /* a power of two: a key's upper 16 bits are its place in the table */
#define MOST_SGES 32

struct region {
    uint64_t start, length;
    uint32_t key, access;
};

/* A process's registered memory, which peers read where it is, as a card's table is looked up by what comes over the wire.
 * `sign` is drawn anew by each process, so that a process id that was given again is not taken for the old one. */
struct registry {
    uint64_t sign;
    struct region regions[MOST_REGIONS];
};

struct work { /* one RDMA read or write, in the order of its send queue */
    struct work *next;
    uint64_t id, remote;
    double due;
    uint32_t rkey, bytes;
    int opcode, signaled, sges;
    struct ibv_sge sge[MOST_SGES];
};

struct completion {
    struct completion *next;
    struct ibv_wc wc;
};

struct cq {
    struct ibv_cq base;
    struct completion *first, **last;
};

struct qp {
    struct ibv_qp base;
    struct ibv_qp_cap cap;
    struct qp *next;
    union ibv_gid peer;
    uint8_t timeout, retries;
    double gives_up_at; /* 0 unless the work at the head of its queue was sent and not answered */
    unsigned queued;
    struct work *first, **last;
};

/* One lock for the card of a process: its queues, its registry and its completions. */
extern pthread_mutex_t nic_lock;
extern pthread_cond_t nic_work, nic_completed;
extern struct registry nic_registry;
extern struct qp *nic_qps;
extern unsigned nic_unreaped; /* completions that nobody has polled yet, of all queues */

double nic_now(void);       /* seconds, monotonic */
void nic_start(void);       /* with the lock; harmless when it runs */
void nic_own_gid(union ibv_gid *gid);
double nic_delay(void);     /* seconds between a post and its bytes */
int nic_wait(pthread_cond_t *cond, double seconds); /* with the lock */

void calm_poller(void); /* calm.c */
