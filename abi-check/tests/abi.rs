//! Every size, offset and number of `farcell-sys` against the C headers.

use std::mem::offset_of;

use farcell_sys as ours;
use rdma_sys as theirs;

/// Compares size and alignment of a structure, and the offset and size of each
/// field named. `field` is one with the same name on both sides; `our => their`
/// one whose names differ.
macro_rules! same {
    ($ty:ident { $($field:ident $(=> $($their:ident).+)?),* $(,)? }) => {
        #[test]
        fn $ty() {
            assert_eq!(size_of::<ours::$ty>(), size_of::<theirs::$ty>(), "size");
            assert_eq!(align_of::<ours::$ty>(), align_of::<theirs::$ty>(), "alignment");
            $(
                assert_eq!(
                    offset_of!(ours::$ty, $field),
                    same!(@their $ty $field $($($their).+)?),
                    "offset of {}", stringify!($field)
                );
                assert_eq!(
                    field_size(|it: &ours::$ty| &raw const it.$field),
                    field_size(|it: &theirs::$ty| same!(@raw it $field $($($their).+)?)),
                    "size of {}", stringify!($field)
                );
            )*
        }
    };
    (@their $ty:ident $field:ident) => { offset_of!(theirs::$ty, $field) };
    (@their $ty:ident $field:ident $($their:ident).+) => { offset_of!(theirs::$ty, $($their).+) };
    (@raw $it:ident $field:ident) => { &raw const $it.$field };
    (@raw $it:ident $field:ident $($their:ident).+) => { &raw const $it.$($their).+ };
}

/// The size of what a field accessor points to; the accessor is never called.
fn field_size<T, F>(_: impl Fn(&T) -> *const F) -> usize {
    size_of::<F>()
}

same!(ibv_gid { raw });
same!(ibv_gid_entry { gid, gid_index, port_num, gid_type, ndev_ifindex });
same!(ibv_device_attr {
    fw_ver,
    node_guid,
    sys_image_guid,
    max_mr_size,
    page_size_cap,
    vendor_id,
    vendor_part_id,
    hw_ver,
    max_qp,
    max_qp_wr,
    device_cap_flags,
    max_sge,
    max_sge_rd,
    max_cq,
    max_cqe,
    max_mr,
    max_pd,
    max_qp_rd_atom,
    max_ee_rd_atom,
    max_res_rd_atom,
    max_qp_init_rd_atom,
    max_ee_init_rd_atom,
    atomic_cap,
    max_ee,
    max_rdd,
    max_mw,
    max_raw_ipv6_qp,
    max_raw_ethy_qp,
    max_mcast_grp,
    max_mcast_qp_attach,
    max_total_mcast_qp_attach,
    max_ah,
    max_fmr,
    max_map_per_fmr,
    max_srq,
    max_srq_wr,
    max_srq_sge,
    max_pkeys,
    local_ca_ack_delay,
    phys_port_cnt,
});
same!(ibv_port_attr {
    state,
    max_mtu,
    active_mtu,
    gid_tbl_len,
    port_cap_flags,
    max_msg_sz,
    bad_pkey_cntr,
    qkey_viol_cntr,
    pkey_tbl_len,
    lid,
    sm_lid,
    lmc,
    max_vl_num,
    sm_sl,
    subnet_timeout,
    init_type_reply,
    active_width,
    active_speed,
    phys_state,
    link_layer,
    flags,
    port_cap_flags2,
});
same!(_ibv_device_ops { _dummy1, _dummy2 });
same!(ibv_device { _ops, node_type, transport_type, name, dev_name, dev_path, ibdev_path });
same!(ibv_context_ops {
    _compat_query_device,
    _compat_query_port,
    _compat_alloc_pd,
    _compat_dealloc_pd,
    _compat_reg_mr,
    _compat_rereg_mr,
    _compat_dereg_mr,
    alloc_mw,
    bind_mw,
    dealloc_mw,
    _compat_create_cq,
    poll_cq,
    req_notify_cq,
    _compat_cq_event,
    _compat_resize_cq,
    _compat_destroy_cq,
    _compat_create_srq,
    _compat_modify_srq,
    _compat_query_srq,
    _compat_destroy_srq,
    post_srq_recv,
    _compat_create_qp,
    _compat_query_qp,
    _compat_modify_qp,
    _compat_destroy_qp,
    post_send,
    post_recv,
    _compat_create_ah,
    _compat_destroy_ah,
    _compat_attach_mcast,
    _compat_detach_mcast,
    _compat_async_event,
});
same!(ibv_context { device, ops, cmd_fd, async_fd, num_comp_vectors, mutex, abi_compat });
same!(ibv_pd { context, handle });
same!(ibv_mr { context, pd, addr, length, handle, lkey, rkey });
same!(ibv_comp_channel { context, fd, refcnt });
same!(ibv_cq {
    context,
    channel,
    cq_context,
    handle,
    cqe,
    mutex,
    cond,
    comp_events_completed,
    async_events_completed,
});
same!(ibv_srq { context, srq_context, pd, handle, mutex, cond, events_completed });
same!(ibv_srq_attr { max_wr, max_sge, srq_limit });
same!(ibv_srq_init_attr { srq_context, attr });
same!(ibv_qp {
    context,
    qp_context,
    pd,
    send_cq,
    recv_cq,
    srq,
    handle,
    qp_num,
    state,
    qp_type,
    mutex,
    cond,
    events_completed,
});
same!(ibv_qp_cap { max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data });
same!(ibv_qp_init_attr { qp_context, send_cq, recv_cq, srq, cap, qp_type, sq_sig_all });
same!(ibv_global_route { dgid, flow_label, sgid_index, hop_limit, traffic_class });
same!(ibv_ah_attr { grh, dlid, sl, src_path_bits, static_rate, is_global, port_num });
same!(ibv_qp_attr {
    qp_state,
    cur_qp_state,
    path_mtu,
    path_mig_state,
    qkey,
    rq_psn,
    sq_psn,
    dest_qp_num,
    qp_access_flags,
    cap,
    ah_attr,
    alt_ah_attr,
    pkey_index,
    alt_pkey_index,
    en_sqd_async_notify,
    sq_draining,
    max_rd_atomic,
    max_dest_rd_atomic,
    min_rnr_timer,
    port_num,
    timeout,
    retry_cnt,
    rnr_retry,
    alt_port_num,
    alt_timeout,
    rate_limit,
});
same!(ibv_sge { addr, length, lkey });
same!(ibv_send_wr {
    wr_id, next, sg_list, num_sge, opcode, send_flags,
    imm_data => imm_data_invalidated_rkey_union,
    wr,
    xrc_remote_srqn => qp_type,
    unused => bind_mw_tso_union,
});
same!(ibv_recv_wr { wr_id, next, sg_list, num_sge });
same!(ibv_wc {
    wr_id, status, opcode, vendor_err, byte_len,
    imm_data => imm_data_invalidated_rkey_union,
    qp_num, src_qp, wc_flags, pkey_index, slid, sl, dlid_path_bits,
});
same!(ibv_async_event { element, event_type });

#[test]
fn the_unions_of_a_send_request() {
    assert_eq!(size_of::<ours::ibv_send_wr_wr>(), size_of::<theirs::wr_t>());
    assert_eq!(size_of::<ours::ibv_send_wr_rdma>(), size_of::<theirs::rdma_t>());
    assert_eq!(
        offset_of!(ours::ibv_send_wr_rdma, remote_addr),
        offset_of!(theirs::rdma_t, remote_addr)
    );
    assert_eq!(offset_of!(ours::ibv_send_wr_rdma, rkey), offset_of!(theirs::rdma_t, rkey));
    assert_eq!(size_of::<ours::ibv_send_wr_atomic>(), size_of::<theirs::atomic_t>());
    assert_eq!(
        offset_of!(ours::ibv_send_wr_atomic, remote_addr),
        offset_of!(theirs::atomic_t, remote_addr)
    );
    assert_eq!(
        offset_of!(ours::ibv_send_wr_atomic, compare_add),
        offset_of!(theirs::atomic_t, compare_add)
    );
    assert_eq!(offset_of!(ours::ibv_send_wr_atomic, swap), offset_of!(theirs::atomic_t, swap));
    assert_eq!(offset_of!(ours::ibv_send_wr_atomic, rkey), offset_of!(theirs::atomic_t, rkey));
}

#[test]
fn the_element_of_an_event() {
    assert_eq!(
        size_of::<ours::ibv_async_event_element>(),
        size_of::<theirs::ibv_async_event_element_t>()
    );
}

/// Plain, module-like and bit-field enumerations are three shapes in bindgen;
/// each number is compared through the one it has.
macro_rules! numbers {
    ($test:ident: $($name:ident = $their:expr),* $(,)?) => {
        #[test]
        fn $test() {
            $( assert_eq!(i128::from(ours::$name), $their as i128, stringify!($name)); )*
        }
    };
    ($test:ident in $module:ident: $($name:ident),* $(,)?) => {
        numbers!($test: $($name = theirs::$module::$name),*);
    };
    ($test:ident bits $ty:ident: $($name:ident),* $(,)?) => {
        numbers!($test: $($name = theirs::$ty::$name.0),*);
    };
}

numbers!(node_type in ibv_node_type: IBV_NODE_CA, IBV_NODE_RNIC);
numbers!(transport_type in ibv_transport_type: IBV_TRANSPORT_IB, IBV_TRANSPORT_IWARP);
numbers!(atomic_cap in ibv_atomic_cap: IBV_ATOMIC_NONE, IBV_ATOMIC_HCA, IBV_ATOMIC_GLOB);
numbers!(mtu in ibv_mtu: IBV_MTU_256, IBV_MTU_512, IBV_MTU_1024, IBV_MTU_2048, IBV_MTU_4096);
numbers!(port_state in ibv_port_state:
    IBV_PORT_NOP, IBV_PORT_DOWN, IBV_PORT_INIT, IBV_PORT_ARMED, IBV_PORT_ACTIVE,
    IBV_PORT_ACTIVE_DEFER);
numbers!(event_type:
    IBV_EVENT_CQ_ERR = theirs::ibv_event_type::IBV_EVENT_CQ_ERR,
    IBV_EVENT_QP_FATAL = theirs::ibv_event_type::IBV_EVENT_QP_FATAL,
    IBV_EVENT_QP_REQ_ERR = theirs::ibv_event_type::IBV_EVENT_QP_REQ_ERR,
    IBV_EVENT_QP_ACCESS_ERR = theirs::ibv_event_type::IBV_EVENT_QP_ACCESS_ERR,
    IBV_EVENT_COMM_EST = theirs::ibv_event_type::IBV_EVENT_COMM_EST,
    IBV_EVENT_SQ_DRAINED = theirs::ibv_event_type::IBV_EVENT_SQ_DRAINED,
    IBV_EVENT_PATH_MIG = theirs::ibv_event_type::IBV_EVENT_PATH_MIG,
    IBV_EVENT_PATH_MIG_ERR = theirs::ibv_event_type::IBV_EVENT_PATH_MIG_ERR,
    IBV_EVENT_DEVICE_FATAL = theirs::ibv_event_type::IBV_EVENT_DEVICE_FATAL,
    IBV_EVENT_PORT_ACTIVE = theirs::ibv_event_type::IBV_EVENT_PORT_ACTIVE,
    IBV_EVENT_PORT_ERR = theirs::ibv_event_type::IBV_EVENT_PORT_ERR,
    IBV_EVENT_LID_CHANGE = theirs::ibv_event_type::IBV_EVENT_LID_CHANGE,
    IBV_EVENT_PKEY_CHANGE = theirs::ibv_event_type::IBV_EVENT_PKEY_CHANGE,
    IBV_EVENT_SM_CHANGE = theirs::ibv_event_type::IBV_EVENT_SM_CHANGE,
    IBV_EVENT_SRQ_ERR = theirs::ibv_event_type::IBV_EVENT_SRQ_ERR,
    IBV_EVENT_SRQ_LIMIT_REACHED = theirs::ibv_event_type::IBV_EVENT_SRQ_LIMIT_REACHED,
    IBV_EVENT_QP_LAST_WQE_REACHED = theirs::ibv_event_type::IBV_EVENT_QP_LAST_WQE_REACHED,
    IBV_EVENT_CLIENT_REREGISTER = theirs::ibv_event_type::IBV_EVENT_CLIENT_REREGISTER,
    IBV_EVENT_GID_CHANGE = theirs::ibv_event_type::IBV_EVENT_GID_CHANGE,
);
numbers!(wc_status in ibv_wc_status:
    IBV_WC_SUCCESS, IBV_WC_LOC_LEN_ERR, IBV_WC_LOC_QP_OP_ERR, IBV_WC_LOC_PROT_ERR,
    IBV_WC_WR_FLUSH_ERR, IBV_WC_LOC_ACCESS_ERR, IBV_WC_REM_INV_REQ_ERR, IBV_WC_REM_ACCESS_ERR,
    IBV_WC_REM_OP_ERR, IBV_WC_RETRY_EXC_ERR, IBV_WC_RNR_RETRY_EXC_ERR, IBV_WC_REM_ABORT_ERR,
    IBV_WC_FATAL_ERR, IBV_WC_RESP_TIMEOUT_ERR, IBV_WC_GENERAL_ERR);
numbers!(wc_opcode in ibv_wc_opcode:
    IBV_WC_SEND, IBV_WC_RDMA_WRITE, IBV_WC_RDMA_READ, IBV_WC_COMP_SWAP, IBV_WC_FETCH_ADD,
    IBV_WC_RECV, IBV_WC_RECV_RDMA_WITH_IMM);
numbers!(wc_flags bits ibv_wc_flags: IBV_WC_GRH, IBV_WC_WITH_IMM);
numbers!(access bits ibv_access_flags:
    IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_REMOTE_WRITE, IBV_ACCESS_REMOTE_READ,
    IBV_ACCESS_REMOTE_ATOMIC);
numbers!(qp_type in ibv_qp_type: IBV_QPT_RC);
numbers!(qp_state in ibv_qp_state:
    IBV_QPS_RESET, IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS, IBV_QPS_SQD, IBV_QPS_SQE, IBV_QPS_ERR);
numbers!(qp_mask bits ibv_qp_attr_mask:
    IBV_QP_STATE, IBV_QP_ACCESS_FLAGS, IBV_QP_PKEY_INDEX, IBV_QP_PORT, IBV_QP_AV, IBV_QP_PATH_MTU,
    IBV_QP_TIMEOUT, IBV_QP_RETRY_CNT, IBV_QP_RNR_RETRY, IBV_QP_RQ_PSN, IBV_QP_MAX_QP_RD_ATOMIC,
    IBV_QP_MIN_RNR_TIMER, IBV_QP_SQ_PSN, IBV_QP_MAX_DEST_RD_ATOMIC, IBV_QP_CAP, IBV_QP_DEST_QPN);
numbers!(srq_mask bits ibv_srq_attr_mask: IBV_SRQ_LIMIT);
numbers!(wr_opcode in ibv_wr_opcode:
    IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_SEND, IBV_WR_SEND_WITH_IMM,
    IBV_WR_RDMA_READ, IBV_WR_ATOMIC_CMP_AND_SWP, IBV_WR_ATOMIC_FETCH_AND_ADD);
numbers!(send_flags bits ibv_send_flags:
    IBV_SEND_FENCE, IBV_SEND_SIGNALED, IBV_SEND_SOLICITED, IBV_SEND_INLINE);
// The link layers have no name of their own in C, so bindgen leaves them out;
// tests on a device see the Ethernet one.
numbers!(gid_type:
    IBV_GID_TYPE_IB = theirs::IBV_GID_TYPE_IB,
    IBV_GID_TYPE_ROCE_V1 = theirs::IBV_GID_TYPE_ROCE_V1,
    IBV_GID_TYPE_ROCE_V2 = theirs::IBV_GID_TYPE_ROCE_V2);
numbers!(fork_status:
    IBV_FORK_DISABLED = theirs::IBV_FORK_DISABLED,
    IBV_FORK_ENABLED = theirs::IBV_FORK_ENABLED,
    IBV_FORK_UNNEEDED = theirs::IBV_FORK_UNNEEDED);
