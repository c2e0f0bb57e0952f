/* libibverbs over the card of nic.c: one device with one RoCE port. mori loads it by name in the place of the real one.
 *
 * Only what mori.io uses with notifications and completion events off, as vLLM has them, is here: RDMA reads and writes on
 * reliable connections. Everything else is refused with an error, not ignored.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "nic.h"

static const double POLL_S = 0.02; /* how long a poll that finds nothing lets others have the core */
static uint32_t next_qp_num = 0x10, next_region;

static int refuse(void) {
    errno = EOPNOTSUPP;
    return EOPNOTSUPP;
}

/* ---- device and port ---- */

static struct ibv_device card = {.node_type = IBV_NODE_CA, .name = "kvcover0", .dev_name = "kvcover0"};

struct ibv_device **ibv_get_device_list(int *count) {
    struct ibv_device **list = calloc(2, sizeof *list);
    Dl_info self;
    /* mori goes up this path until a part looks like a PCI address, without end where none does: the build makes such a folder */
    if (dladdr((void *)ibv_get_device_list, &self) && strrchr(self.dli_fname, '/')) {
        int length = (int)(strrchr(self.dli_fname, '/') - self.dli_fname);
        snprintf(card.ibdev_path, sizeof card.ibdev_path, "%.*s/0000:01:00.0", length, self.dli_fname);
        memcpy(card.dev_path, card.ibdev_path, sizeof card.dev_path);
    }
    if (list) list[0] = &card;
    if (count) *count = list ? 1 : 0;
    return list;
}

void ibv_free_device_list(struct ibv_device **list) { free(list); }

static int poll_cq(struct ibv_cq *base, int room, struct ibv_wc *into) {
    struct cq *cq = (struct cq *)base;
    int found = 0;
    pthread_mutex_lock(&nic_lock);
    /* mori polls without a pause, which a core of its own bears and two cores for sixteen ranks don't */
    if (!nic_unreaped) nic_wait(&nic_completed, POLL_S);
    while (found < room && cq->first) {
        struct completion *done = cq->first;
        into[found++] = done->wc;
        cq->first = done->next;
        if (!cq->first) cq->last = &cq->first;
        free(done);
        nic_unreaped--;
    }
    pthread_mutex_unlock(&nic_lock);
    return found;
}

static int req_notify_cq(struct ibv_cq *cq, int solicited) {
    (void)cq, (void)solicited;
    return refuse();
}

static int post_recv(struct ibv_qp *qp, void *list, void **bad) {
    (void)qp;
    *bad = list;
    return refuse();
}

static struct work *work_of(const struct ibv_send_wr *wr) {
    if ((wr->opcode != IBV_WR_RDMA_READ && wr->opcode != IBV_WR_RDMA_WRITE) || wr->num_sge > MOST_SGES) return 0;
    if (wr->send_flags & IBV_SEND_INLINE) return 0;
    struct work *work = calloc(1, sizeof *work);
    if (!work) return 0;
    work->id = wr->wr_id;
    work->opcode = wr->opcode;
    work->signaled = !!(wr->send_flags & IBV_SEND_SIGNALED);
    work->remote = wr->rdma.remote_addr;
    work->rkey = wr->rdma.rkey;
    work->sges = wr->num_sge;
    work->due = nic_now() + nic_delay();
    for (int i = 0; i < wr->num_sge; i++) {
        work->sge[i] = wr->sg_list[i];
        work->bytes += wr->sg_list[i].length;
    }
    return work;
}

static int post_send(struct ibv_qp *base, struct ibv_send_wr *list, struct ibv_send_wr **bad) {
    struct qp *qp = (struct qp *)base;
    int error = 0;
    pthread_mutex_lock(&nic_lock);
    for (struct ibv_send_wr *wr = list; wr && !error; wr = wr->next) {
        struct work *work = 0;
        if (base->state != IBV_QPS_RTS && base->state != IBV_QPS_ERR) error = EINVAL;
        else if (qp->queued >= qp->cap.max_send_wr) error = ENOMEM; /* the send queue is full */
        else if (!(work = work_of(wr))) error = EINVAL;
        if (error) {
            *bad = wr;
        } else {
            *qp->last = work;
            qp->last = &work->next;
            qp->queued++;
        }
    }
    pthread_cond_signal(&nic_work);
    pthread_mutex_unlock(&nic_lock);
    return error;
}

struct ibv_context *ibv_open_device(struct ibv_device *device) {
    struct ibv_context *context = calloc(1, sizeof *context);
    if (!context) return 0;
    context->device = device;
    context->cmd_fd = -1;
    context->async_fd = eventfd(0, EFD_CLOEXEC); /* never readable: no event ever comes */
    context->num_comp_vectors = 1;
    pthread_mutex_init(&context->mutex, 0);
    context->poll_cq = poll_cq;
    context->req_notify_cq = req_notify_cq;
    context->post_send = post_send;
    context->post_recv = post_recv;
    calm_poller();
    pthread_mutex_lock(&nic_lock);
    nic_start();
    pthread_mutex_unlock(&nic_lock);
    return context;
}

int ibv_close_device(struct ibv_context *context) {
    close(context->async_fd);
    free(context);
    return 0;
}

int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *attr) {
    (void)context;
    *attr = (struct ibv_device_attr){.fw_ver = "kvcover", .max_mr_size = ~0ull, .page_size_cap = 0xfffff000, .max_qp = 1 << 16,
        .max_qp_wr = 1 << 15, .max_sge = MOST_SGES - 2, .max_cq = 1 << 16, .max_cqe = 1 << 22, .max_mr = MOST_REGIONS, .max_pd = 1 << 16,
        .max_qp_rd_atom = 16, .max_qp_init_rd_atom = 16, .phys_port_cnt = 1};
    return 0;
}

int ibv_query_port(struct ibv_context *context, uint8_t port, struct ibv_port_attr *attr) {
    (void)context;
    if (port != 1) return EINVAL;
    attr->state = IBV_PORT_ACTIVE; /* field by field: older callers have a shorter struct */
    attr->max_mtu = attr->active_mtu = IBV_MTU_4096;
    attr->gid_tbl_len = attr->pkey_tbl_len = 1;
    attr->max_msg_sz = 1u << 30;
    attr->active_width = 2;
    attr->active_speed = 128;
    attr->phys_state = 5;
    attr->link_layer = IBV_LINK_LAYER_ETHERNET;
    return 0;
}

int ibv_query_gid(struct ibv_context *context, uint8_t port, int index, union ibv_gid *gid) {
    (void)context;
    if (port != 1 || index) return EINVAL;
    nic_own_gid(gid);
    return 0;
}

int _ibv_query_gid_ex(struct ibv_context *context, uint32_t port, uint32_t index, struct ibv_gid_entry *entry, uint32_t flags, size_t size) {
    (void)flags, (void)size;
    *entry = (struct ibv_gid_entry){.port_num = port, .gid_type = IBV_GID_TYPE_ROCE_V2};
    return ibv_query_gid(context, (uint8_t)port, (int)index, &entry->gid);
}

/* ---- memory ---- */

struct ibv_pd *ibv_alloc_pd(struct ibv_context *context) {
    struct ibv_pd *pd = calloc(1, sizeof *pd);
    if (pd) pd->context = context;
    return pd;
}

int ibv_dealloc_pd(struct ibv_pd *pd) {
    free(pd);
    return 0;
}

struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *start, size_t length, int access) {
    struct ibv_mr *mr = calloc(1, sizeof *mr);
    if (!mr) return 0;
    pthread_mutex_lock(&nic_lock);
    uint32_t place = ++next_region % MOST_REGIONS, key = place << 16 | (1 + next_region / MOST_REGIONS);
    nic_registry.regions[place] = (struct region){(uint64_t)(uintptr_t)start, length, key, (uint32_t)access};
    pthread_mutex_unlock(&nic_lock);
    *mr = (struct ibv_mr){.context = pd->context, .pd = pd, .addr = start, .length = length, .handle = place, .lkey = key, .rkey = key};
    return mr;
}

struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *start, size_t length, uint64_t iova, unsigned access) {
    if (iova != (uint64_t)(uintptr_t)start) {
        refuse();
        return 0;
    }
    return ibv_reg_mr(pd, start, length, (int)access);
}

int ibv_dereg_mr(struct ibv_mr *mr) {
    pthread_mutex_lock(&nic_lock); /* what is being moved is over before it returns */
    nic_registry.regions[mr->handle] = (struct region){0};
    pthread_mutex_unlock(&nic_lock);
    free(mr);
    return 0;
}

/* ---- queues ---- */

struct ibv_cq *ibv_create_cq(struct ibv_context *context, int entries, void *cq_context, struct ibv_comp_channel *channel, int vector) {
    (void)vector;
    struct cq *cq = calloc(1, sizeof *cq);
    if (!cq) return 0;
    cq->base.context = context;
    cq->base.channel = channel;
    cq->base.cq_context = cq_context;
    cq->base.cqe = entries;
    cq->last = &cq->first;
    return &cq->base;
}

int ibv_destroy_cq(struct ibv_cq *base) {
    struct cq *cq = (struct cq *)base;
    pthread_mutex_lock(&nic_lock);
    for (struct completion *next; cq->first; cq->first = next) {
        next = cq->first->next;
        free(cq->first);
        nic_unreaped--;
    }
    pthread_mutex_unlock(&nic_lock);
    free(cq);
    return 0;
}

struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr) {
    struct qp *qp = calloc(1, sizeof *qp);
    if (!qp) return 0;
    qp->base.context = pd->context;
    qp->base.qp_context = attr->qp_context;
    qp->base.pd = pd;
    qp->base.send_cq = attr->send_cq;
    qp->base.recv_cq = attr->recv_cq;
    qp->base.qp_type = attr->qp_type;
    qp->base.state = IBV_QPS_RESET;
    qp->cap = attr->cap;
    qp->last = &qp->first;
    pthread_mutex_lock(&nic_lock);
    qp->base.qp_num = ++next_qp_num;
    qp->next = nic_qps;
    nic_qps = qp;
    pthread_mutex_unlock(&nic_lock);
    return &qp->base;
}

int ibv_modify_qp(struct ibv_qp *base, struct ibv_qp_attr *attr, int mask) {
    struct qp *qp = (struct qp *)base;
    pthread_mutex_lock(&nic_lock);
    if (mask & IBV_QP_AV) qp->peer = attr->ah_attr.dgid;
    if (mask & IBV_QP_TIMEOUT) qp->timeout = attr->timeout;
    if (mask & IBV_QP_RETRY_CNT) qp->retries = attr->retry_cnt;
    if (mask & IBV_QP_STATE) base->state = attr->qp_state;
    pthread_cond_signal(&nic_work);
    pthread_mutex_unlock(&nic_lock);
    return 0;
}

int ibv_destroy_qp(struct ibv_qp *base) {
    struct qp *qp = (struct qp *)base;
    pthread_mutex_lock(&nic_lock);
    for (struct qp **at = &nic_qps; *at; at = &(*at)->next)
        if (*at == qp) {
            *at = qp->next;
            break;
        }
    for (struct work *next; qp->first; qp->first = next) {
        next = qp->first->next;
        free(qp->first);
    }
    pthread_mutex_unlock(&nic_lock);
    free(qp);
    return 0;
}

/* ---- what no one asks for here ---- */

void *ibv_create_comp_channel(struct ibv_context *context) { return (void)context, refuse(), (void *)0; }
void *ibv_create_srq(struct ibv_pd *pd, void *attr) { return (void)pd, (void)attr, refuse(), (void *)0; }
void *ibv_reg_dmabuf_mr(void) { return refuse(), (void *)0; }
int ibv_destroy_comp_channel(void *channel) { return (void)channel, refuse(); }
int ibv_destroy_srq(void *srq) { return (void)srq, refuse(); }
int ibv_get_cq_event(void *channel, void **cq, void **context) { return (void)channel, (void)cq, (void)context, refuse(), -1; }
int ibv_get_async_event(void *context, void *event) { return (void)context, (void)event, refuse(), -1; }
void ibv_ack_cq_events(void *cq, unsigned count) { (void)cq, (void)count; }
void ibv_ack_async_event(void *event) { (void)event; }

const char *ibv_wc_status_str(enum ibv_wc_status status) { /* as libibverbs words them: they reach vLLM's messages */
    switch (status) {
        case IBV_WC_SUCCESS: return "success";
        case IBV_WC_LOC_PROT_ERR: return "local protection error";
        case IBV_WC_WR_FLUSH_ERR: return "Work Request Flushed Error";
        case IBV_WC_REM_ACCESS_ERR: return "remote access error";
        case IBV_WC_RETRY_EXC_ERR: return "transport retry counter exceeded";
    }
    return "unknown";
}
