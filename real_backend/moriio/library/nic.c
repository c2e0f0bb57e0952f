/* The card: a thread that takes work from the send queues of its process, in order within a queue, checks keys and bounds as
 * a card does, moves the bytes between the two processes' memories and leaves completions.
 *
 * What is of a reliable connection: a queue pair is dead after its first error, and flushes what is queued then or later; a
 * peer that is gone is noticed when timeout and retries are over, which mori sets. What is not: see docs/loopback.md.
 */
#define _GNU_SOURCE
#include "nic.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static const double LONG_S = 3600, ACK_UNIT_S = 4.096e-6;

pthread_mutex_t nic_lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t nic_work, nic_completed;
struct registry nic_registry;
struct qp *nic_qps;
unsigned nic_unreaped;
static pid_t runs_in;
static double delay_s;

double nic_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

int nic_wait(pthread_cond_t *cond, double seconds) {
    double until = nic_now() + seconds;
    struct timespec t = {(time_t)until, 0};
    t.tv_nsec = (long)((until - (double)t.tv_sec) * 1e9);
    return pthread_cond_timedwait(cond, &nic_lock, &t);
}

double nic_delay(void) { return delay_s; }

/* Called by kvcover: a slow network. */
void kvcover_nic_delay(double seconds) { delay_s = seconds; }

/* ---- when bytes were in place: mori says that a batch is complete, and not when it was ---- */

static struct landing {
    uint64_t start, end, at_ns;
} *landings;
static size_t landed, room;

static void note(const struct work *work) {
    uint64_t at_ns = (uint64_t)(nic_now() * 1e9);
    for (int i = 0; i < work->sges; i++) {
        if (landed == room) {
            struct landing *larger = realloc(landings, (room = room ? 2 * room : 1024) * sizeof *larger);
            if (!larger) abort();
            landings = larger;
        }
        landings[landed++] = (struct landing){work->sge[i].addr, work->sge[i].addr + work->sge[i].length, at_ns};
    }
}

/* Called by kvcover: when the first transfer after `since_ns` of this address here was over, on the monotonic clock; else 0. */
uint64_t kvcover_nic_landed(uint64_t address, uint64_t since_ns) {
    uint64_t found = 0;
    pthread_mutex_lock(&nic_lock);
    for (size_t i = 0; i < landed && !found; i++)
        if (landings[i].start <= address && address < landings[i].end && landings[i].at_ns >= since_ns) found = landings[i].at_ns;
    pthread_mutex_unlock(&nic_lock);
    return found;
}

/* ---- who a peer is: a GID holds process id, sign, and where that process keeps its registry ---- */

struct peer {
    pid_t pid;
    uint16_t sign;
    uint64_t registry;
};

void nic_own_gid(union ibv_gid *gid) {
    uint32_t pid = (uint32_t)getpid();
    uint64_t at = (uint64_t)(uintptr_t)&nic_registry;
    gid->raw[0] = 0xfd; /* a unique local address of IPv6: mori passes over empty and link-local ones */
    gid->raw[1] = 'k';
    memcpy(gid->raw + 2, &nic_registry.sign, 2);
    memcpy(gid->raw + 4, &pid, 4);
    memcpy(gid->raw + 8, &at, 8);
}

static struct peer peer_of(const union ibv_gid *gid) {
    struct peer peer;
    uint32_t pid;
    memcpy(&peer.sign, gid->raw + 2, 2);
    memcpy(&pid, gid->raw + 4, 4);
    memcpy(&peer.registry, gid->raw + 8, 8);
    peer.pid = (pid_t)pid;
    return peer;
}

/* The entry of a key in a peer's registry; 0 if that process is gone. */
static int look_up(struct peer peer, uint32_t key, struct region *found) {
    uint64_t sign;
    struct iovec here[2] = {{&sign, sizeof sign}, {found, sizeof *found}};
    uint64_t entry = peer.registry + offsetof(struct registry, regions) + (key >> 16) * sizeof *found;
    struct iovec there[2] = {{(void *)peer.registry, sizeof sign}, {(void *)entry, sizeof *found}};
    ssize_t got = process_vm_readv(peer.pid, here, 2, there, 2, 0);
    return got == (ssize_t)(sizeof sign + sizeof *found) && (uint16_t)sign == peer.sign;
}

static int holds(const struct region *region, uint32_t key, uint64_t start, uint64_t bytes) {
    uint64_t offset = start - region->start;
    return region->key == key && start >= region->start && offset <= region->length && bytes <= region->length - offset;
}

/* ---- moving ---- */

static enum ibv_wc_status copy(const struct work *work, pid_t pid) {
    struct iovec local[MOST_SGES], remote = {(void *)work->remote, work->bytes};
    struct iovec *at = local;
    for (int i = 0; i < work->sges; i++) local[i] = (struct iovec){(void *)work->sge[i].addr, work->sge[i].length};
    while (remote.iov_len) { /* the kernel may stop short anywhere */
        unsigned long left = (unsigned long)(local + work->sges - at);
        ssize_t moved = work->opcode == IBV_WR_RDMA_READ ? process_vm_readv(pid, at, left, &remote, 1, 0)
                                                         : process_vm_writev(pid, at, left, &remote, 1, 0);
        if (moved <= 0) return moved < 0 && errno == ESRCH ? IBV_WC_RETRY_EXC_ERR : IBV_WC_REM_ACCESS_ERR;
        remote.iov_base = (char *)remote.iov_base + moved;
        remote.iov_len -= (size_t)moved;
        for (size_t rest = (size_t)moved; rest;) {
            size_t part = rest < at->iov_len ? rest : at->iov_len;
            at->iov_base = (char *)at->iov_base + part;
            at->iov_len -= part;
            rest -= part;
            if (!at->iov_len) at++;
        }
    }
    return IBV_WC_SUCCESS;
}

static enum ibv_wc_status perform(const struct qp *qp, const struct work *work) {
    for (int i = 0; i < work->sges; i++) {
        const struct ibv_sge *sge = &work->sge[i];
        if (!holds(&nic_registry.regions[sge->lkey >> 16], sge->lkey, sge->addr, sge->length)) return IBV_WC_LOC_PROT_ERR;
    }
    struct peer peer = peer_of(&qp->peer);
    struct region region;
    if (!look_up(peer, work->rkey, &region)) return IBV_WC_RETRY_EXC_ERR;
    unsigned needed = work->opcode == IBV_WR_RDMA_READ ? IBV_ACCESS_REMOTE_READ : IBV_ACCESS_REMOTE_WRITE;
    if (!holds(&region, work->rkey, work->remote, work->bytes) || !(region.access & needed)) return IBV_WC_REM_ACCESS_ERR;
    return copy(work, peer.pid);
}

static void complete(struct qp *qp, const struct work *work, enum ibv_wc_status status) {
    struct completion *done = calloc(1, sizeof *done);
    if (!done) abort();
    done->wc.wr_id = work->id;
    done->wc.status = (int)status;
    done->wc.opcode = work->opcode == IBV_WR_RDMA_READ ? IBV_WC_RDMA_READ : IBV_WC_RDMA_WRITE;
    done->wc.byte_len = work->bytes;
    done->wc.qp_num = qp->base.qp_num;
    struct cq *cq = (struct cq *)qp->base.send_cq;
    *cq->last = done;
    cq->last = &done->next;
    nic_unreaped++;
    pthread_cond_broadcast(&nic_completed);
}

/* Whether a peer that doesn't answer may still do so. A timeout of 0 waits for ever, as the verbs say. */
static int waits_for_answer(struct qp *qp, double now) {
    if (!qp->timeout) return 1;
    if (!qp->gives_up_at) qp->gives_up_at = now + ACK_UNIT_S * (double)(1u << (qp->timeout & 31)) * (qp->retries + 1);
    return now < qp->gives_up_at;
}

/* Work off one queue; returns the seconds until there is something to do again. */
static double serve(struct qp *qp) {
    while (qp->first) {
        struct work *work = qp->first;
        enum ibv_wc_status status = IBV_WC_WR_FLUSH_ERR;
        double now = nic_now();
        if (qp->base.state != IBV_QPS_ERR) {
            if (work->due > now) return work->due - now;
            status = perform(qp, work);
            if (status == IBV_WC_RETRY_EXC_ERR && waits_for_answer(qp, now)) return 0.01;
        }
        qp->gives_up_at = 0;
        qp->first = work->next;
        if (!qp->first) qp->last = &qp->first;
        qp->queued--;
        if (status == IBV_WC_SUCCESS) note(work);
        else qp->base.state = IBV_QPS_ERR;
        if (status != IBV_WC_SUCCESS || work->signaled) complete(qp, work, status);
        free(work);
    }
    return LONG_S;
}

static void *run(void *unused) {
    (void)unused;
    prctl(PR_SET_NAME, "kvcover-nic", 0, 0, 0);
    pthread_mutex_lock(&nic_lock);
    for (;;) {
        double rest = LONG_S;
        for (struct qp *qp = nic_qps; qp; qp = qp->next) {
            double until = serve(qp);
            if (until < rest) rest = until;
        }
        nic_wait(&nic_work, rest);
    }
    return 0;
}

void nic_start(void) {
    if (runs_in == getpid()) return;
    runs_in = getpid();
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&nic_work, &monotonic);
    pthread_cond_init(&nic_completed, &monotonic);
    if (getrandom(&nic_registry.sign, sizeof nic_registry.sign, 0) < 0) nic_registry.sign = (uint64_t)(nic_now() * 1e9);
    prctl(PR_SET_PTRACER, (unsigned long)-1, 0, 0, 0); /* peers reach this memory also where the Yama module would forbid it */
    pthread_t thread;
    if (pthread_create(&thread, 0, run, 0)) abort();
    pthread_detach(thread);
}
