//! The calls themselves: [`Library`]'s methods for what are symbols of the
//! library, and for what goes through the slots of an open device.
//!
//! Each keeps the meaning of the C function of its name. What the C function
//! demands of its pointers is the caller's to hold: valid, of this library,
//! not yet destroyed, and the order of destruction as `verbs(7)` has it.

#![allow(
    clippy::missing_safety_doc,
    reason = "one rule for all, stated above: the pointers are live objects of this library"
)]

use std::ffi::{CStr, c_int, c_uint, c_void};
use std::mem::MaybeUninit;
use std::ptr::{self, NonNull};

use crate::call::{CallError, Failure, clear_errno, failed, pointer, status};
use crate::library::Library;
use crate::types::{
    ibv_async_event, ibv_comp_channel, ibv_context, ibv_cq, ibv_device, ibv_device_attr,
    ibv_fork_status, ibv_gid, ibv_gid_entry, ibv_mr, ibv_pd, ibv_port_attr, ibv_qp, ibv_qp_attr,
    ibv_qp_init_attr, ibv_recv_wr, ibv_send_wr, ibv_srq, ibv_srq_attr, ibv_srq_init_attr, ibv_wc,
    ibv_wc_status,
};

/// More than any version of `ibv_port_attr` has.
const PORT_ATTR_ROOM: usize = 512;

#[repr(C)]
union PortAttrBuffer {
    attr: ibv_port_attr,
    room: [u64; PORT_ATTR_ROOM / 8],
}

const _: () = assert!(size_of::<PortAttrBuffer>() == PORT_ATTR_ROOM);

fn null_slot(call: &'static str) -> CallError {
    CallError { call, failure: Failure::NullSlot }
}

#[allow(
    missing_docs,
    reason = "each method is the C function of its name, `ibv_` left out; see its manual page"
)]
impl Library {
    pub unsafe fn get_device_list(&self) -> Result<(NonNull<*mut ibv_device>, usize), CallError> {
        const CALL: &str = "ibv_get_device_list";
        let mut count: c_int = 0;
        clear_errno();
        // SAFETY: `count` outlives the call.
        let list = pointer(CALL, unsafe { (self.functions.get_device_list)(&raw mut count) })?;
        Ok((list, usize::try_from(count).unwrap_or(0)))
    }

    pub unsafe fn free_device_list(&self, list: NonNull<*mut ibv_device>) {
        // SAFETY: the caller's.
        unsafe { (self.functions.free_device_list)(list.as_ptr()) }
    }

    pub unsafe fn open_device(
        &self,
        device: NonNull<ibv_device>,
    ) -> Result<NonNull<ibv_context>, CallError> {
        clear_errno();
        // SAFETY: the caller's.
        pointer("ibv_open_device", unsafe { (self.functions.open_device)(device.as_ptr()) })
    }

    pub unsafe fn close_device(&self, context: NonNull<ibv_context>) -> Result<(), CallError> {
        clear_errno();
        // SAFETY: the caller's.
        status("ibv_close_device", unsafe { (self.functions.close_device)(context.as_ptr()) })
    }

    pub unsafe fn get_async_event(
        &self,
        context: NonNull<ibv_context>,
    ) -> Result<ibv_async_event, CallError> {
        let mut event = MaybeUninit::<ibv_async_event>::zeroed();
        clear_errno();
        // SAFETY: the caller's; `event` outlives the call.
        status("ibv_get_async_event", unsafe {
            (self.functions.get_async_event)(context.as_ptr(), event.as_mut_ptr())
        })?;
        // SAFETY: all-zero is a valid value, and the call only wrote more.
        Ok(unsafe { event.assume_init() })
    }

    pub unsafe fn ack_async_event(&self, event: &mut ibv_async_event) {
        // SAFETY: the caller's.
        unsafe { (self.functions.ack_async_event)(event) }
    }

    pub unsafe fn query_device(
        &self,
        context: NonNull<ibv_context>,
    ) -> Result<ibv_device_attr, CallError> {
        let mut attr = MaybeUninit::<ibv_device_attr>::zeroed();
        clear_errno();
        // SAFETY: the caller's; `attr` outlives the call.
        status("ibv_query_device", unsafe {
            (self.functions.query_device)(context.as_ptr(), attr.as_mut_ptr())
        })?;
        // SAFETY: all-zero is a valid value, and the call only wrote more.
        Ok(unsafe { attr.assume_init() })
    }

    /// The structure grew with time, and which part of it is written depends
    /// on the library: the buffer is larger than every known version, and
    /// zero where nothing was written.
    pub unsafe fn query_port(
        &self,
        context: NonNull<ibv_context>,
        port: u8,
    ) -> Result<ibv_port_attr, CallError> {
        let mut buffer = PortAttrBuffer { room: [0; PORT_ATTR_ROOM / 8] };
        clear_errno();
        // SAFETY: the caller's; `buffer` outlives the call.
        status("ibv_query_port", unsafe {
            (self.functions.query_port)(context.as_ptr(), port, (&raw mut buffer).cast())
        })?;
        // SAFETY: plain integers, zero or written by the call.
        Ok(unsafe { buffer.attr })
    }

    pub unsafe fn query_gid(
        &self,
        context: NonNull<ibv_context>,
        port: u8,
        index: c_int,
    ) -> Result<ibv_gid, CallError> {
        let mut gid = ibv_gid::default();
        clear_errno();
        // SAFETY: the caller's; `gid` outlives the call.
        status("ibv_query_gid", unsafe {
            (self.functions.query_gid)(context.as_ptr(), port, index, &raw mut gid)
        })?;
        Ok(gid)
    }

    /// Since version 1.11; `Failure::NoSymbol` before.
    pub unsafe fn query_gid_ex(
        &self,
        context: NonNull<ibv_context>,
        port: u32,
        index: u32,
    ) -> Result<ibv_gid_entry, CallError> {
        const CALL: &str = "ibv_query_gid_ex";
        let query = self
            .functions
            .query_gid_ex
            .ok_or(CallError { call: CALL, failure: Failure::NoSymbol })?;
        let mut entry = ibv_gid_entry::default();
        clear_errno();
        // SAFETY: the caller's; `entry` outlives the call, and its size is told.
        status(CALL, unsafe {
            query(context.as_ptr(), port, index, &raw mut entry, 0, size_of::<ibv_gid_entry>())
        })?;
        Ok(entry)
    }

    pub unsafe fn alloc_pd(
        &self,
        context: NonNull<ibv_context>,
    ) -> Result<NonNull<ibv_pd>, CallError> {
        clear_errno();
        // SAFETY: the caller's.
        pointer("ibv_alloc_pd", unsafe { (self.functions.alloc_pd)(context.as_ptr()) })
    }

    pub unsafe fn dealloc_pd(&self, pd: NonNull<ibv_pd>) -> Result<(), CallError> {
        clear_errno();
        // SAFETY: the caller's.
        status("ibv_dealloc_pd", unsafe { (self.functions.dealloc_pd)(pd.as_ptr()) })
    }

    /// The memory must stay mapped until [`Library::dereg_mr`] has succeeded.
    pub unsafe fn reg_mr(
        &self,
        pd: NonNull<ibv_pd>,
        address: *mut c_void,
        length: usize,
        access: c_uint,
    ) -> Result<NonNull<ibv_mr>, CallError> {
        const CALL: &str = "ibv_reg_mr";
        let access = c_int::try_from(access).map_err(|_| failed(CALL, libc::EINVAL))?;
        clear_errno();
        // SAFETY: the caller's.
        pointer(CALL, unsafe { (self.functions.reg_mr)(pd.as_ptr(), address, length, access) })
    }

    pub unsafe fn dereg_mr(&self, mr: NonNull<ibv_mr>) -> Result<(), CallError> {
        clear_errno();
        // SAFETY: the caller's.
        status("ibv_dereg_mr", unsafe { (self.functions.dereg_mr)(mr.as_ptr()) })
    }

    pub unsafe fn create_comp_channel(
        &self,
        context: NonNull<ibv_context>,
    ) -> Result<NonNull<ibv_comp_channel>, CallError> {
        clear_errno();
        // SAFETY: the caller's.
        pointer("ibv_create_comp_channel", unsafe {
            (self.functions.create_comp_channel)(context.as_ptr())
        })
    }

    pub unsafe fn destroy_comp_channel(
        &self,
        channel: NonNull<ibv_comp_channel>,
    ) -> Result<(), CallError> {
        clear_errno();
        // SAFETY: the caller's.
        status("ibv_destroy_comp_channel", unsafe {
            (self.functions.destroy_comp_channel)(channel.as_ptr())
        })
    }

    pub unsafe fn create_cq(
        &self,
        context: NonNull<ibv_context>,
        entries: c_int,
        cq_context: *mut c_void,
        channel: Option<NonNull<ibv_comp_channel>>,
        vector: c_int,
    ) -> Result<NonNull<ibv_cq>, CallError> {
        let channel = channel.map_or(ptr::null_mut(), NonNull::as_ptr);
        clear_errno();
        // SAFETY: the caller's.
        pointer("ibv_create_cq", unsafe {
            (self.functions.create_cq)(context.as_ptr(), entries, cq_context, channel, vector)
        })
    }

    /// Blocks until every event taken by [`Library::get_cq_event`] is
    /// acknowledged.
    pub unsafe fn destroy_cq(&self, cq: NonNull<ibv_cq>) -> Result<(), CallError> {
        clear_errno();
        // SAFETY: the caller's.
        status("ibv_destroy_cq", unsafe { (self.functions.destroy_cq)(cq.as_ptr()) })
    }

    /// Blocks unless the channel's descriptor is non-blocking.
    pub unsafe fn get_cq_event(
        &self,
        channel: NonNull<ibv_comp_channel>,
    ) -> Result<(NonNull<ibv_cq>, *mut c_void), CallError> {
        const CALL: &str = "ibv_get_cq_event";
        let mut cq = ptr::null_mut();
        let mut cq_context = ptr::null_mut();
        clear_errno();
        // SAFETY: the caller's; both places outlive the call.
        status(CALL, unsafe {
            (self.functions.get_cq_event)(channel.as_ptr(), &raw mut cq, &raw mut cq_context)
        })?;
        Ok((pointer(CALL, cq)?, cq_context))
    }

    pub unsafe fn ack_cq_events(&self, cq: NonNull<ibv_cq>, count: c_uint) {
        // SAFETY: the caller's.
        unsafe { (self.functions.ack_cq_events)(cq.as_ptr(), count) }
    }

    pub unsafe fn create_srq(
        &self,
        pd: NonNull<ibv_pd>,
        attr: &mut ibv_srq_init_attr,
    ) -> Result<NonNull<ibv_srq>, CallError> {
        clear_errno();
        // SAFETY: the caller's.
        pointer("ibv_create_srq", unsafe { (self.functions.create_srq)(pd.as_ptr(), attr) })
    }

    pub unsafe fn modify_srq(
        &self,
        srq: NonNull<ibv_srq>,
        attr: &mut ibv_srq_attr,
        mask: c_uint,
    ) -> Result<(), CallError> {
        clear_errno();
        // SAFETY: the caller's.
        status("ibv_modify_srq", unsafe {
            (self.functions.modify_srq)(srq.as_ptr(), attr, mask.cast_signed())
        })
    }

    pub unsafe fn destroy_srq(&self, srq: NonNull<ibv_srq>) -> Result<(), CallError> {
        clear_errno();
        // SAFETY: the caller's.
        status("ibv_destroy_srq", unsafe { (self.functions.destroy_srq)(srq.as_ptr()) })
    }

    pub unsafe fn create_qp(
        &self,
        pd: NonNull<ibv_pd>,
        attr: &mut ibv_qp_init_attr,
    ) -> Result<NonNull<ibv_qp>, CallError> {
        clear_errno();
        // SAFETY: the caller's.
        pointer("ibv_create_qp", unsafe { (self.functions.create_qp)(pd.as_ptr(), attr) })
    }

    pub unsafe fn modify_qp(
        &self,
        qp: NonNull<ibv_qp>,
        attr: &mut ibv_qp_attr,
        mask: c_uint,
    ) -> Result<(), CallError> {
        clear_errno();
        // SAFETY: the caller's.
        status("ibv_modify_qp", unsafe {
            (self.functions.modify_qp)(qp.as_ptr(), attr, mask.cast_signed())
        })
    }

    pub unsafe fn query_qp(
        &self,
        qp: NonNull<ibv_qp>,
        mask: c_uint,
    ) -> Result<(ibv_qp_attr, ibv_qp_init_attr), CallError> {
        let mut attr = ibv_qp_attr::default();
        let mut init = MaybeUninit::<ibv_qp_init_attr>::zeroed();
        clear_errno();
        // SAFETY: the caller's; both places outlive the call.
        status("ibv_query_qp", unsafe {
            (self.functions.query_qp)(
                qp.as_ptr(),
                &raw mut attr,
                mask.cast_signed(),
                init.as_mut_ptr(),
            )
        })?;
        // SAFETY: all-zero is a valid value, and the call only wrote more.
        Ok((attr, unsafe { init.assume_init() }))
    }

    /// Blocks until the queue pair's asynchronous events are acknowledged.
    pub unsafe fn destroy_qp(&self, qp: NonNull<ibv_qp>) -> Result<(), CallError> {
        clear_errno();
        // SAFETY: the caller's.
        status("ibv_destroy_qp", unsafe { (self.functions.destroy_qp)(qp.as_ptr()) })
    }

    /// The library's own words for a completion status.
    #[must_use]
    pub fn wc_status_str(&self, status: ibv_wc_status) -> &'static str {
        // SAFETY: takes any number, and answers with a string of its own.
        let text = unsafe { (self.functions.wc_status_str)(status) };
        if text.is_null() {
            return "unknown";
        }
        // SAFETY: a null-terminated constant of a library that is never
        // unloaded.
        unsafe { CStr::from_ptr(text) }.to_str().unwrap_or("unknown")
    }

    /// Must come before the first registration of the process, else `EINVAL`.
    pub fn fork_init(&self) -> Result<(), CallError> {
        clear_errno();
        // SAFETY: no arguments; the library guards its own state.
        status("ibv_fork_init", unsafe { (self.functions.fork_init)() })
    }

    /// `None` before version 1.13.
    #[must_use]
    pub fn fork_status(&self) -> Option<ibv_fork_status> {
        // SAFETY: no arguments.
        self.functions.is_fork_initialized.map(|query| unsafe { query() })
    }

    /// Takes up to `completions.len()` completions; answers how many.
    #[inline]
    pub unsafe fn poll_cq(
        &self,
        cq: NonNull<ibv_cq>,
        completions: &mut [ibv_wc],
    ) -> Result<usize, CallError> {
        const CALL: &str = "ibv_poll_cq";
        // SAFETY: a live queue points to its live context.
        let slot = unsafe { (*(*cq.as_ptr()).context).ops.poll_cq }.ok_or(null_slot(CALL))?;
        let room = c_int::try_from(completions.len()).unwrap_or(c_int::MAX);
        // SAFETY: room for that many completions.
        let taken = unsafe { slot(cq.as_ptr(), room, completions.as_mut_ptr()) };
        usize::try_from(taken)
            .map(|taken| taken.min(completions.len()))
            .map_err(|_| failed(CALL, taken.saturating_abs()))
    }

    pub unsafe fn req_notify_cq(
        &self,
        cq: NonNull<ibv_cq>,
        solicited_only: bool,
    ) -> Result<(), CallError> {
        const CALL: &str = "ibv_req_notify_cq";
        // SAFETY: a live queue points to its live context.
        let slot = unsafe { (*(*cq.as_ptr()).context).ops.req_notify_cq }.ok_or(null_slot(CALL))?;
        clear_errno();
        // SAFETY: the caller's.
        status(CALL, unsafe { slot(cq.as_ptr(), c_int::from(solicited_only)) })
    }

    /// On failure the requests before `bad` were posted, `bad` and those after
    /// it were not.
    #[inline]
    pub unsafe fn post_send(
        &self,
        qp: NonNull<ibv_qp>,
        first: &mut ibv_send_wr,
        bad: &mut *mut ibv_send_wr,
    ) -> Result<(), CallError> {
        const CALL: &str = "ibv_post_send";
        // SAFETY: a live queue pair points to its live context.
        let slot = unsafe { (*(*qp.as_ptr()).context).ops.post_send }.ok_or(null_slot(CALL))?;
        clear_errno();
        // SAFETY: the caller's.
        status(CALL, unsafe { slot(qp.as_ptr(), first, bad) })
    }

    #[inline]
    pub unsafe fn post_recv(
        &self,
        qp: NonNull<ibv_qp>,
        first: &mut ibv_recv_wr,
        bad: &mut *mut ibv_recv_wr,
    ) -> Result<(), CallError> {
        const CALL: &str = "ibv_post_recv";
        // SAFETY: a live queue pair points to its live context.
        let slot = unsafe { (*(*qp.as_ptr()).context).ops.post_recv }.ok_or(null_slot(CALL))?;
        clear_errno();
        // SAFETY: the caller's.
        status(CALL, unsafe { slot(qp.as_ptr(), first, bad) })
    }

    #[inline]
    pub unsafe fn post_srq_recv(
        &self,
        srq: NonNull<ibv_srq>,
        first: &mut ibv_recv_wr,
        bad: &mut *mut ibv_recv_wr,
    ) -> Result<(), CallError> {
        const CALL: &str = "ibv_post_srq_recv";
        // SAFETY: a live queue points to its live context.
        let slot =
            unsafe { (*(*srq.as_ptr()).context).ops.post_srq_recv }.ok_or(null_slot(CALL))?;
        clear_errno();
        // SAFETY: the caller's.
        status(CALL, unsafe { slot(srq.as_ptr(), first, bad) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A zeroed object, as a provider that fills in nothing would hand out.
    fn zeroed<T>() -> Box<MaybeUninit<T>> {
        Box::new(MaybeUninit::zeroed())
    }

    #[test]
    fn a_null_slot_is_an_error_and_no_jump() {
        let Ok(library) = Library::load() else {
            println!("no libibverbs.so.1: nothing tested here");
            return;
        };
        let mut context = zeroed::<ibv_context>();
        let (mut cq, mut qp, mut srq) =
            (zeroed::<ibv_cq>(), zeroed::<ibv_qp>(), zeroed::<ibv_srq>());
        // SAFETY: all-zero is a valid value of these types; only the context
        // pointers are looked at.
        unsafe {
            (*cq.as_mut_ptr()).context = context.as_mut_ptr();
            (*qp.as_mut_ptr()).context = context.as_mut_ptr();
            (*srq.as_mut_ptr()).context = context.as_mut_ptr();
            let cq = NonNull::new_unchecked(cq.as_mut_ptr());
            let qp = NonNull::new_unchecked(qp.as_mut_ptr());
            let srq = NonNull::new_unchecked(srq.as_mut_ptr());
            let mut send: ibv_send_wr = MaybeUninit::zeroed().assume_init();
            let mut recv: ibv_recv_wr = MaybeUninit::zeroed().assume_init();
            let errors = [
                library.poll_cq(cq, &mut [ibv_wc::default()]).unwrap_err(),
                library.req_notify_cq(cq, false).unwrap_err(),
                library.post_send(qp, &mut send, &mut ptr::null_mut()).unwrap_err(),
                library.post_recv(qp, &mut recv, &mut ptr::null_mut()).unwrap_err(),
                library.post_srq_recv(srq, &mut recv, &mut ptr::null_mut()).unwrap_err(),
            ];
            let calls = errors.map(|error| {
                assert_eq!(error.failure, Failure::NullSlot);
                assert_eq!(error.errno(), libc::EOPNOTSUPP);
                error.call
            });
            assert_eq!(
                calls,
                [
                    "ibv_poll_cq",
                    "ibv_req_notify_cq",
                    "ibv_post_send",
                    "ibv_post_recv",
                    "ibv_post_srq_recv"
                ]
            );
        }
    }
}
