//! Asynchronous events: what happens to a device unasked.

use farcell_sys as sys;

use super::device::Context;
use super::error::Error;
use super::hint;

/// Something that happened to a device. See `ibv_get_async_event(3)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AsyncEvent {
    /// The device is broken: reopen it.
    DeviceFatal,
    /// A port carries traffic again.
    PortActive(u8),
    /// A port has lost its link.
    PortDown(u8),
    /// A port's LID, GIDs, keys or subnet manager have changed.
    PortChanged(u8),
    /// A queue pair, by number, is broken.
    QueuePairError(u32),
    /// A packet reached a queue pair that was not ready to send yet.
    Established(u32),
    /// A queue pair on a shared receive queue takes no more from it.
    LastReceive(u32),
    /// A completion queue has overrun or is broken.
    CompletionQueueError,
    /// A shared receive queue is broken.
    ReceiveQueueError,
    /// A shared receive queue holds fewer receives than its limit.
    ReceiveQueueLow,
    /// Something else, by the number of the C interface.
    Other(u32),
}

impl Context {
    /// Takes the next asynchronous event, if there is one. Does not block; one
    /// system call. The device's descriptor ([`AsFd`](std::os::fd::AsFd))
    /// becomes readable when there is one.
    ///
    /// # Errors
    /// [`Error::Call`]: EIO or ENODEV for a device that is gone.
    /// [`Error::Forked`].
    pub fn next_async_event(&self) -> Result<Option<AsyncEvent>, Error> {
        self.check()?;
        // SAFETY: open until drop.
        let mut event = match unsafe { self.library().get_async_event(self.raw()) } {
            Ok(event) => event,
            Err(error) if matches!(error.errno(), sys::libc::EAGAIN | sys::libc::EINTR) => {
                return Ok(None);
            }
            Err(error) => return Err(hint::explain(error, self, None)),
        };
        let port = || {
            // SAFETY: the library fills this member for events of a port.
            let port = unsafe { event.element.port_num };
            u8::try_from(port).unwrap_or(0)
        };
        let queue_pair = || {
            // SAFETY: the library fills this member for events of a queue
            // pair, and the queue pair cannot be destroyed before the event is
            // acknowledged below.
            unsafe { (*event.element.qp).qp_num }
        };
        let known = match event.event_type {
            sys::IBV_EVENT_DEVICE_FATAL => AsyncEvent::DeviceFatal,
            sys::IBV_EVENT_PORT_ACTIVE => AsyncEvent::PortActive(port()),
            sys::IBV_EVENT_PORT_ERR => AsyncEvent::PortDown(port()),
            sys::IBV_EVENT_LID_CHANGE
            | sys::IBV_EVENT_PKEY_CHANGE
            | sys::IBV_EVENT_SM_CHANGE
            | sys::IBV_EVENT_CLIENT_REREGISTER
            | sys::IBV_EVENT_GID_CHANGE => AsyncEvent::PortChanged(port()),
            sys::IBV_EVENT_QP_FATAL
            | sys::IBV_EVENT_QP_REQ_ERR
            | sys::IBV_EVENT_QP_ACCESS_ERR
            | sys::IBV_EVENT_PATH_MIG_ERR => AsyncEvent::QueuePairError(queue_pair()),
            sys::IBV_EVENT_COMM_EST => AsyncEvent::Established(queue_pair()),
            sys::IBV_EVENT_QP_LAST_WQE_REACHED => AsyncEvent::LastReceive(queue_pair()),
            sys::IBV_EVENT_CQ_ERR => AsyncEvent::CompletionQueueError,
            sys::IBV_EVENT_SRQ_ERR => AsyncEvent::ReceiveQueueError,
            sys::IBV_EVENT_SRQ_LIMIT_REACHED => AsyncEvent::ReceiveQueueLow,
            other => AsyncEvent::Other(other),
        };
        // SAFETY: taken above and acknowledged once.
        unsafe { self.library().ack_async_event(&mut event) };
        Ok(Some(known))
    }
}
