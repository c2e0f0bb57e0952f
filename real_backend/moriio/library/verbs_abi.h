/* The part of libibverbs' binary interface that mori.io uses: names, values and layouts as in rdma-core's <infiniband/verbs.h>
 * (its licence: GPL-2 or the OpenIB BSD licence; BSD is what this is taken under). Own text, so that no system package is needed.
 * Fields that are here only to keep the others at their places are called `unused`.
 */
#pragma once
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

union ibv_gid {
    uint8_t raw[16];
    uint64_t half[2];
};

struct ibv_device {
    void *unused[2];
    int node_type, transport_type;
    char name[64], dev_name[64], dev_path[256], ibdev_path[256];
};

struct ibv_device_attr {
    char fw_ver[64];
    uint64_t node_guid, sys_image_guid, max_mr_size, page_size_cap;
    uint32_t vendor_id, vendor_part_id, hw_ver;
    int max_qp, max_qp_wr;
    unsigned device_cap_flags;
    int max_sge, max_sge_rd, max_cq, max_cqe, max_mr, max_pd, max_qp_rd_atom, max_ee_rd_atom, max_res_rd_atom, max_qp_init_rd_atom;
    int unused[13], max_srq, max_srq_wr, max_srq_sge;
    uint16_t max_pkeys;
    uint8_t local_ca_ack_delay, phys_port_cnt;
};

struct ibv_port_attr { /* as far as the oldest callers have it */
    int state, max_mtu, active_mtu, gid_tbl_len;
    uint32_t port_cap_flags, max_msg_sz, bad_pkey_cntr, qkey_viol_cntr;
    uint16_t pkey_tbl_len, lid, sm_lid;
    uint8_t lmc, max_vl_num, sm_sl, subnet_timeout, init_type_reply, active_width, active_speed, phys_state, link_layer, flags;
};
enum { IBV_PORT_ACTIVE = 4, IBV_MTU_4096 = 5, IBV_LINK_LAYER_ETHERNET = 2, IBV_GID_TYPE_ROCE_V2 = 2, IBV_NODE_CA = 1 };

struct ibv_gid_entry {
    union ibv_gid gid;
    uint32_t gid_index, port_num, gid_type, ndev_ifindex;
};

struct ibv_sge {
    uint64_t addr;
    uint32_t length, lkey;
};

enum { IBV_WR_RDMA_WRITE = 0, IBV_WR_RDMA_READ = 4 };
enum { IBV_SEND_SIGNALED = 1 << 1, IBV_SEND_INLINE = 1 << 3 };

struct ibv_send_wr {
    uint64_t wr_id;
    struct ibv_send_wr *next;
    struct ibv_sge *sg_list;
    int num_sge, opcode;
    unsigned send_flags;
    uint32_t imm_data;
    struct {
        uint64_t remote_addr;
        uint32_t rkey;
    } rdma; /* first member of a union; what follows in it is not read here */
};

enum ibv_wc_status {
    IBV_WC_SUCCESS = 0,
    IBV_WC_LOC_PROT_ERR = 4,
    IBV_WC_WR_FLUSH_ERR = 5,
    IBV_WC_REM_ACCESS_ERR = 10,
    IBV_WC_RETRY_EXC_ERR = 12
};
enum { IBV_WC_RDMA_WRITE = 1, IBV_WC_RDMA_READ = 2 };

struct ibv_wc {
    uint64_t wr_id;
    int status, opcode;
    uint32_t vendor_err, byte_len, imm_data, qp_num, src_qp;
    unsigned wc_flags;
    uint16_t pkey_index, slid;
    uint8_t sl, dlid_path_bits;
};

enum { IBV_ACCESS_REMOTE_WRITE = 1 << 1, IBV_ACCESS_REMOTE_READ = 1 << 2 };

struct ibv_pd {
    struct ibv_context *context;
    uint32_t handle;
};

struct ibv_mr {
    struct ibv_context *context;
    struct ibv_pd *pd;
    void *addr;
    size_t length;
    uint32_t handle, lkey, rkey;
};

struct ibv_comp_channel {
    struct ibv_context *context;
    int fd, refcnt;
};

struct ibv_cq {
    struct ibv_context *context;
    struct ibv_comp_channel *channel;
    void *cq_context;
    uint32_t handle;
    int cqe;
    pthread_mutex_t mutex;
    pthread_cond_t cond;
    uint32_t comp_events_completed, async_events_completed;
};

struct ibv_qp_cap {
    uint32_t max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data;
};

struct ibv_qp_init_attr {
    void *qp_context;
    struct ibv_cq *send_cq, *recv_cq;
    void *srq;
    struct ibv_qp_cap cap;
    int qp_type, sq_sig_all;
};

enum { IBV_QPS_RESET = 0, IBV_QPS_RTS = 3, IBV_QPS_ERR = 6 };
enum { IBV_QP_STATE = 1 << 0, IBV_QP_AV = 1 << 7, IBV_QP_TIMEOUT = 1 << 9, IBV_QP_RETRY_CNT = 1 << 10 };

struct ibv_ah_attr {
    union ibv_gid dgid;
    uint32_t flow_label;
    uint8_t sgid_index, hop_limit, traffic_class;
    uint16_t dlid;
    uint8_t sl, src_path_bits, static_rate, is_global, port_num;
};

struct ibv_qp_attr {
    int qp_state, cur_qp_state, path_mtu, path_mig_state;
    uint32_t qkey, rq_psn, sq_psn, dest_qp_num;
    unsigned qp_access_flags;
    struct ibv_qp_cap cap;
    struct ibv_ah_attr ah_attr, alt_ah_attr;
    uint16_t pkey_index, alt_pkey_index;
    uint8_t en_sqd_async_notify, sq_draining, max_rd_atomic, max_dest_rd_atomic, min_rnr_timer, port_num, timeout, retry_cnt, rnr_retry,
        alt_port_num, alt_timeout;
    uint32_t rate_limit;
};

struct ibv_qp {
    struct ibv_context *context;
    void *qp_context;
    struct ibv_pd *pd;
    struct ibv_cq *send_cq, *recv_cq;
    void *srq;
    uint32_t handle, qp_num;
    int state, qp_type;
    pthread_mutex_t mutex;
    pthread_cond_t cond;
    uint32_t events_completed;
};

struct ibv_context { /* callers reach four of the operations through this table, and not by name */
    struct ibv_device *device;
    void *unused_before_poll[11];
    int (*poll_cq)(struct ibv_cq *, int, struct ibv_wc *);
    int (*req_notify_cq)(struct ibv_cq *, int);
    void *unused_before_post[12];
    int (*post_send)(struct ibv_qp *, struct ibv_send_wr *, struct ibv_send_wr **);
    int (*post_recv)(struct ibv_qp *, void *, void **);
    void *unused_after_post[5];
    int cmd_fd, async_fd, num_comp_vectors;
    pthread_mutex_t mutex;
    void *abi_compat;
};
