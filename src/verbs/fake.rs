//! A libibverbs without a device, for tests: it hands out objects, notes each
//! call, and fails where a test asks it to. What it notes is per thread, so
//! tests do not see each other.

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::OnceLock;

use farcell_sys as sys;
use sys::{
    ibv_async_event, ibv_comp_channel, ibv_context, ibv_cq, ibv_device, ibv_device_attr, ibv_gid,
    ibv_gid_entry, ibv_mr, ibv_pd, ibv_port_attr, ibv_qp, ibv_qp_attr, ibv_qp_init_attr,
    ibv_recv_wr, ibv_send_wr, ibv_srq, ibv_srq_attr, ibv_srq_init_attr, ibv_wc, libc,
};

/// What one test sees and sets.
#[derive(Default)]
pub(super) struct State {
    /// The calls, in order, by their C names.
    pub log: Vec<&'static str>,
    /// Calls that fail, with what errno.
    pub fail: HashMap<&'static str, i32>,
    /// Whether the provider leaves its slots null.
    pub null_slots: bool,
    /// Whether there is no device.
    pub no_device: bool,
    /// What ports are in (default: active).
    pub port_state: Option<sys::ibv_port_state>,
    /// The requests that were posted to send queues: id, opcode, flags.
    pub sent: Vec<(u64, u32, u32)>,
    /// After how many further requests posting fails.
    pub room: Option<usize>,
    /// Whether the device keeps its requests to itself, completing none.
    pub silent: bool,
    /// The ids that were posted to receive queues.
    pub receives: VecDeque<u64>,
    completions: VecDeque<ibv_wc>,
}

thread_local! {
    static STATE: RefCell<State> = RefCell::default();
}

pub(super) fn state<T>(look: impl FnOnce(&mut State) -> T) -> T {
    STATE.with_borrow_mut(look)
}

/// A completion comes in from the device.
pub(super) fn complete(id: u64, status: sys::ibv_wc_status, immediate: Option<u32>) {
    state(|state| {
        state.completions.push_back(ibv_wc {
            wr_id: id,
            status,
            qp_num: 7,
            imm_data: immediate.unwrap_or(0).to_be(),
            wc_flags: immediate.map_or(0, |_| sys::IBV_WC_WITH_IMM),
            ..Default::default()
        });
    });
}

/// How often a call was made.
pub(super) fn count(call: &str) -> usize {
    state(|state| state.log.iter().filter(|&&seen| seen == call).count())
}

/// Notes a call; answers the errno that it shall fail with, or 0.
fn note(call: &'static str) -> c_int {
    let errno = state(|state| {
        state.log.push(call);
        state.fail.get(call).copied().unwrap_or(0)
    });
    if errno != 0 {
        // SAFETY: this thread's own errno cell.
        unsafe { *libc::__errno_location() = errno };
    }
    errno
}

/// An object of zeroes, or null where the call shall fail.
fn object<T>(call: &'static str, fill: impl FnOnce(&mut T)) -> *mut T {
    if note(call) != 0 {
        return ptr::null_mut();
    }
    // SAFETY: all-zero is a valid value of every type of the ABI.
    let mut object: Box<T> = unsafe { Box::new(MaybeUninit::zeroed().assume_init()) };
    fill(&mut object);
    Box::into_raw(object)
}

/// Ends an object, unless the call shall fail.
///
/// # Safety
/// It came from `object`.
unsafe fn end<T>(call: &'static str, object: *mut T) -> c_int {
    let errno = note(call);
    if errno == 0 {
        // SAFETY: the caller's.
        drop(unsafe { Box::from_raw(object) });
    }
    errno
}

fn pipe() -> c_int {
    let mut ends = [0; 2];
    // SAFETY: room for two descriptors.
    assert_eq!(unsafe { libc::pipe(ends.as_mut_ptr()) }, 0);
    ends[0]
}

unsafe extern "C" fn get_device_list(count: *mut c_int) -> *mut *mut ibv_device {
    if note("ibv_get_device_list") != 0 {
        return ptr::null_mut();
    }
    let none = state(|state| state.no_device);
    let device = object::<ibv_device>("device", |device| {
        for (to, from) in device.name.iter_mut().zip(b"fake0") {
            *to = from.cast_signed();
        }
    });
    let list = if none { vec![ptr::null_mut()] } else { vec![device, ptr::null_mut()] };
    // SAFETY: the caller's.
    unsafe { *count = c_int::from(!none) };
    Box::leak(list.into_boxed_slice()).as_mut_ptr()
}

unsafe extern "C" fn free_device_list(_: *mut *mut ibv_device) {
    note("ibv_free_device_list");
}

unsafe extern "C" fn open_device(device: *mut ibv_device) -> *mut ibv_context {
    object("ibv_open_device", |context: &mut ibv_context| {
        context.device = device;
        context.async_fd = pipe();
        if !state(|state| state.null_slots) {
            context.ops.poll_cq = Some(poll_cq);
            context.ops.req_notify_cq = Some(req_notify_cq);
            context.ops.post_send = Some(post_send);
            context.ops.post_recv = Some(post_recv);
            context.ops.post_srq_recv = Some(post_srq_recv);
        }
    })
}

unsafe extern "C" fn close_device(context: *mut ibv_context) -> c_int {
    // SAFETY: a context of this fake.
    unsafe { end("ibv_close_device", context) }
}

unsafe extern "C" fn get_async_event(_: *mut ibv_context, _: *mut ibv_async_event) -> c_int {
    // SAFETY: this thread's own errno cell.
    unsafe { *libc::__errno_location() = libc::EAGAIN };
    -1
}

unsafe extern "C" fn ack_async_event(_: *mut ibv_async_event) {}

unsafe extern "C" fn query_device(_: *mut ibv_context, attr: *mut ibv_device_attr) -> c_int {
    // SAFETY: the caller's.
    let attr = unsafe { &mut *attr };
    attr.max_qp_wr = 64;
    attr.max_cqe = 256;
    attr.max_mr_size = 1 << 30;
    attr.max_srq = 1;
    attr.max_srq_wr = 64;
    attr.max_qp_rd_atom = 128;
    attr.max_qp_init_rd_atom = 128;
    attr.atomic_cap = sys::IBV_ATOMIC_HCA;
    attr.phys_port_cnt = 1;
    note("ibv_query_device")
}

unsafe extern "C" fn query_port(_: *mut ibv_context, _: u8, attr: *mut ibv_port_attr) -> c_int {
    // SAFETY: the caller's.
    let attr = unsafe { &mut *attr };
    attr.state = state(|state| state.port_state).unwrap_or(sys::IBV_PORT_ACTIVE);
    attr.gid_tbl_len = 3;
    attr.lid = 5;
    // What a library that is newer than this code writes.
    // SAFETY: the buffer has room for any version.
    unsafe { ptr::from_mut(attr).cast::<u8>().add(100).write(1) };
    note("ibv_query_port")
}

unsafe extern "C" fn query_gid(
    _: *mut ibv_context,
    _: u8,
    index: c_int,
    gid: *mut ibv_gid,
) -> c_int {
    // SAFETY: the caller's.
    unsafe { (*gid).raw[15] = u8::try_from(index).unwrap_or(0) };
    note("ibv_query_gid")
}

unsafe extern "C" fn alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    object("ibv_alloc_pd", |pd: &mut ibv_pd| pd.context = context)
}

unsafe extern "C" fn dealloc_pd(pd: *mut ibv_pd) -> c_int {
    // SAFETY: a domain of this fake.
    unsafe { end("ibv_dealloc_pd", pd) }
}

unsafe extern "C" fn reg_mr(_: *mut ibv_pd, _: *mut c_void, _: usize, _: c_int) -> *mut ibv_mr {
    object("ibv_reg_mr", |mr: &mut ibv_mr| {
        (mr.lkey, mr.rkey) = (11, 12);
    })
}

unsafe extern "C" fn dereg_mr(mr: *mut ibv_mr) -> c_int {
    // SAFETY: a region of this fake.
    unsafe { end("ibv_dereg_mr", mr) }
}

unsafe extern "C" fn create_comp_channel(_: *mut ibv_context) -> *mut ibv_comp_channel {
    object("ibv_create_comp_channel", |channel: &mut ibv_comp_channel| {
        channel.fd = pipe();
    })
}

unsafe extern "C" fn destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int {
    // SAFETY: a channel of this fake.
    unsafe { end("ibv_destroy_comp_channel", channel) }
}

unsafe extern "C" fn create_cq(
    context: *mut ibv_context,
    _: c_int,
    token: *mut c_void,
    _: *mut ibv_comp_channel,
    _: c_int,
) -> *mut ibv_cq {
    object("ibv_create_cq", |cq: &mut ibv_cq| {
        cq.context = context;
        cq.cq_context = token;
    })
}

unsafe extern "C" fn destroy_cq(cq: *mut ibv_cq) -> c_int {
    // SAFETY: a queue of this fake.
    unsafe { end("ibv_destroy_cq", cq) }
}

unsafe extern "C" fn get_cq_event(
    _: *mut ibv_comp_channel,
    _: *mut *mut ibv_cq,
    _: *mut *mut c_void,
) -> c_int {
    // SAFETY: this thread's own errno cell.
    unsafe { *libc::__errno_location() = libc::EAGAIN };
    -1
}

unsafe extern "C" fn ack_cq_events(_: *mut ibv_cq, _: c_uint) {}

unsafe extern "C" fn create_srq(pd: *mut ibv_pd, _: *mut ibv_srq_init_attr) -> *mut ibv_srq {
    object("ibv_create_srq", |srq: &mut ibv_srq| {
        // SAFETY: a domain of this fake.
        srq.context = unsafe { (*pd).context };
    })
}

unsafe extern "C" fn modify_srq(_: *mut ibv_srq, _: *mut ibv_srq_attr, _: c_int) -> c_int {
    note("ibv_modify_srq")
}

unsafe extern "C" fn destroy_srq(srq: *mut ibv_srq) -> c_int {
    // SAFETY: a queue of this fake.
    unsafe { end("ibv_destroy_srq", srq) }
}

unsafe extern "C" fn create_qp(pd: *mut ibv_pd, attr: *mut ibv_qp_init_attr) -> *mut ibv_qp {
    // SAFETY: the caller's.
    let inline = unsafe { &mut (*attr).cap.max_inline_data };
    if *inline > 64 {
        note("ibv_create_qp");
        // SAFETY: this thread's own errno cell.
        unsafe { *libc::__errno_location() = libc::EINVAL };
        return ptr::null_mut();
    }
    object("ibv_create_qp", |qp: &mut ibv_qp| {
        // SAFETY: a domain of this fake.
        qp.context = unsafe { (*pd).context };
        qp.qp_num = 7;
    })
}

unsafe extern "C" fn modify_qp(_: *mut ibv_qp, _: *mut ibv_qp_attr, _: c_int) -> c_int {
    note("ibv_modify_qp")
}

unsafe extern "C" fn query_qp(
    _: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    _: c_int,
    _: *mut ibv_qp_init_attr,
) -> c_int {
    // SAFETY: the caller's.
    unsafe { (*attr).qp_state = sys::IBV_QPS_RTS };
    note("ibv_query_qp")
}

unsafe extern "C" fn destroy_qp(qp: *mut ibv_qp) -> c_int {
    // SAFETY: a queue pair of this fake.
    unsafe { end("ibv_destroy_qp", qp) }
}

unsafe extern "C" fn wc_status_str(_: sys::ibv_wc_status) -> *const c_char {
    c"fake status".as_ptr()
}

unsafe extern "C" fn fork_init() -> c_int {
    note("ibv_fork_init")
}

unsafe extern "C" fn query_gid_ex(
    _: *mut ibv_context,
    _: u32,
    index: u32,
    entry: *mut ibv_gid_entry,
    _: u32,
    size: usize,
) -> c_int {
    assert_eq!(size, size_of::<ibv_gid_entry>());
    if index == 1 {
        return libc::ENODATA;
    }
    // SAFETY: the caller's.
    let entry = unsafe { &mut *entry };
    entry.gid.raw[15] = 9;
    entry.gid_type = sys::IBV_GID_TYPE_ROCE_V2;
    note("ibv_query_gid_ex")
}

unsafe extern "C" fn poll_cq(_: *mut ibv_cq, room: c_int, to: *mut ibv_wc) -> c_int {
    let errno = note("ibv_poll_cq");
    if errno != 0 {
        return -errno;
    }
    state(|state| {
        let mut taken = 0;
        while taken < room {
            let Some(completion) = state.completions.pop_front() else {
                break;
            };
            // SAFETY: the caller has room for `room` completions.
            unsafe { to.add(taken.unsigned_abs() as usize).write(completion) };
            taken += 1;
        }
        taken
    })
}

unsafe extern "C" fn req_notify_cq(_: *mut ibv_cq, _: c_int) -> c_int {
    note("ibv_req_notify_cq")
}

unsafe extern "C" fn post_send(
    _: *mut ibv_qp,
    first: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> c_int {
    let doorbell = note("ibv_post_send");
    let mut next = first;
    while !next.is_null() {
        // SAFETY: the caller's list.
        let wr = unsafe { &*next };
        let full = state(|state| match &mut state.room {
            Some(0) => true,
            Some(room) => {
                *room -= 1;
                false
            }
            None => false,
        });
        if full {
            // SAFETY: the caller's.
            unsafe { *bad = next };
            return libc::ENOMEM;
        }
        let silent = state(|state| {
            state.sent.push((wr.wr_id, wr.opcode, wr.send_flags));
            state.silent
        });
        if wr.send_flags & sys::IBV_SEND_SIGNALED != 0 && !silent {
            complete(wr.wr_id, sys::IBV_WC_SUCCESS, None);
        }
        next = wr.next;
    }
    doorbell
}

unsafe extern "C" fn post_recv(
    _: *mut ibv_qp,
    wr: *mut ibv_recv_wr,
    _: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: the caller's.
    state(|state| state.receives.push_back(unsafe { (*wr).wr_id }));
    note("ibv_post_recv")
}

unsafe extern "C" fn post_srq_recv(
    _: *mut ibv_srq,
    wr: *mut ibv_recv_wr,
    _: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: the caller's.
    state(|state| state.receives.push_back(unsafe { (*wr).wr_id }));
    note("ibv_post_srq_recv")
}

/// The fake library, with or without the call that newer versions have.
pub(super) fn library(new: bool) -> &'static sys::Library {
    static LIBRARIES: [OnceLock<sys::Library>; 2] = [OnceLock::new(), OnceLock::new()];
    LIBRARIES[usize::from(new)].get_or_init(|| {
        let functions = sys::Functions {
            get_device_list,
            free_device_list,
            open_device,
            close_device,
            get_async_event,
            ack_async_event,
            query_device,
            query_port,
            query_gid,
            alloc_pd,
            dealloc_pd,
            reg_mr,
            dereg_mr,
            create_comp_channel,
            destroy_comp_channel,
            create_cq,
            destroy_cq,
            get_cq_event,
            ack_cq_events,
            create_srq,
            modify_srq,
            destroy_srq,
            create_qp,
            modify_qp,
            query_qp,
            destroy_qp,
            wc_status_str,
            fork_init,
            is_fork_initialized: None,
            query_gid_ex: new.then_some(query_gid_ex),
        };
        // SAFETY: each does of its C function what these tests use.
        unsafe { sys::Library::from_functions(functions) }
    })
}
