//! Devices: the list, an open one, its limits and its ports.

use std::ffi::CStr;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};

use farcell_sys as sys;
use sys::fork::Generation;

use super::error::{Error, Place};
use super::hint;

/// libibverbs, prepared for programs that fork.
///
/// Loads the library at the first call (which may block on the file) and asks
/// it to keep registered memory out of forked children; later calls cost
/// nothing. See `ibv_fork_init(3)`; kernels from 5.12 on need no such care and
/// the call does nothing there.
///
/// # Errors
/// [`Error::Library`] where `libibverbs.so.1` is absent or unusable.
pub fn library() -> Result<&'static sys::Library, Error> {
    let library = sys::Library::load()?;
    static PREPARED: OnceLock<()> = OnceLock::new();
    PREPARED.get_or_init(|| {
        // EINVAL: something in this process registered memory before us.
        // ENOSYS: a kernel without MADV_DONTFORK. Both leave farcell working
        // in the parent, so they are worth a warning and no more.
        if let Err(error) = library.fork_init() {
            tracing::warn!(target: "farcell::rdma", "{error}: memory registered for RDMA is not safe across fork");
        }
    });
    Ok(library)
}

/// The devices there are at one moment.
pub struct DeviceList {
    library: &'static sys::Library,
    list: NonNull<*mut sys::ibv_device>,
    count: usize,
}

// SAFETY: the list is never changed after it was made; the library's functions
// may be called from any thread, verbs(7).
unsafe impl Send for DeviceList {}
// SAFETY: as above.
unsafe impl Sync for DeviceList {}

impl fmt::Debug for DeviceList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

impl DeviceList {
    /// Asks for the devices. Reads sysfs, and loads the providers at the first
    /// call. See `ibv_get_device_list(3)`.
    ///
    /// # Errors
    /// [`Error::NoDevice`] where there is none, with what is missing: errno
    /// ENOSYS (no RDMA in the kernel), EPERM, or an empty list.
    /// [`Error::Call`] with ENOMEM.
    pub fn new(library: &'static sys::Library) -> Result<Self, Error> {
        // SAFETY: takes nothing of ours.
        let (list, count) = match unsafe { library.get_device_list() } {
            Ok(found) => found,
            Err(error) if error.errno() == sys::libc::ENOMEM => {
                return Err(hint::explain_at(error, Place::new("list", None)));
            }
            Err(_) => {
                return Err(Error::NoDevice { reason: hint::no_device(Path::new("/")) });
            }
        };
        let list = Self { library, list, count };
        if count == 0 {
            return Err(Error::NoDevice { reason: hint::no_device(Path::new("/")) });
        }
        Ok(list)
    }

    /// The devices, in the library's order.
    pub fn iter(&self) -> impl Iterator<Item = Device<'_>> {
        (0..self.count).filter_map(move |index| {
            // SAFETY: the library said how many pointers there are, and keeps
            // them until the list is freed, which needs `self` gone.
            let raw = NonNull::new(unsafe { *self.list.as_ptr().add(index) })?;
            Some(Device { raw, list: self })
        })
    }

    /// The device of this name.
    ///
    /// # Errors
    /// [`Error::NoSuchDevice`] with the names there are.
    pub fn find(&self, name: &str) -> Result<Device<'_>, Error> {
        self.iter().find(|device| device.name() == name).ok_or_else(|| Error::NoSuchDevice {
            wanted: name.to_owned(),
            present: self.iter().map(|device| device.name().to_owned()).collect(),
        })
    }
}

impl Drop for DeviceList {
    fn drop(&mut self) {
        // SAFETY: no device of this list is borrowed any more; open ones hold
        // their own reference inside the library.
        unsafe { self.library.free_device_list(self.list) }
    }
}

/// How a device talks to its peers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// InfiniBand or RoCE.
    InfiniBand,
    /// iWARP: READ and WRITE, no atomics.
    Iwarp,
    /// Something else.
    Other,
}

/// A device that is not open.
#[derive(Clone, Copy)]
pub struct Device<'list> {
    raw: NonNull<sys::ibv_device>,
    list: &'list DeviceList,
}

impl fmt::Debug for Device<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device")
            .field("name", &self.name())
            .field("transport", &self.transport())
            .finish()
    }
}

impl<'list> Device<'list> {
    /// Its name in the kernel, such as `mlx5_0`.
    #[must_use]
    pub fn name(&self) -> &'list str {
        // SAFETY: the device lives as long as the list; the name is a
        // null-terminated string inside it and never changes.
        let name = unsafe { CStr::from_ptr((&raw const (*self.raw.as_ptr()).name).cast()) };
        name.to_str().unwrap_or("?")
    }

    /// The name of its file in /dev/infiniband.
    fn file(&self) -> &'list str {
        // SAFETY: as for its name.
        let name = unsafe { CStr::from_ptr((&raw const (*self.raw.as_ptr()).dev_name).cast()) };
        name.to_str().unwrap_or("?")
    }

    /// How it talks.
    #[must_use]
    pub fn transport(&self) -> Transport {
        // SAFETY: the device lives as long as the list.
        match unsafe { (*self.raw.as_ptr()).transport_type } {
            sys::IBV_TRANSPORT_IB => Transport::InfiniBand,
            sys::IBV_TRANSPORT_IWARP => Transport::Iwarp,
            _ => Transport::Other,
        }
    }

    /// Opens it and reads its limits. A system call or two. See
    /// `ibv_open_device(3)`, `ibv_query_device(3)`.
    ///
    /// # Errors
    /// [`Error::Call`]: EACCES or EPERM (no right to the device's file), ENOENT
    /// or ENODEV (no such file here, or the device is gone), ENOMEM.
    pub fn open(&self) -> Result<Arc<Context>, Error> {
        let library = self.list.library;
        let name = self.name().to_owned();
        let fail = |error| hint::explain_at(error, Place::new(&name, None));
        // SAFETY: a device of a list that is not freed yet.
        let raw = unsafe { library.open_device(self.raw) }.map_err(|error| {
            hint::open_failed(error, &name, &Path::new("/dev/infiniband").join(self.file()))
        })?;
        // SAFETY: opened above; on failure it is closed again.
        let attr = match unsafe { library.query_device(raw) } {
            Ok(attr) => attr,
            Err(error) => {
                // SAFETY: nobody else knows it.
                let _ = unsafe { library.close_device(raw) };
                return Err(fail(error));
            }
        };
        let context = Context {
            library,
            raw,
            attributes: Attributes::new(&attr),
            transport: self.transport(),
            generation: sys::fork::generation(),
            name,
        };
        rustix::io::ioctl_fionbio(context.as_fd(), true).map_err(|error| {
            Error::system("ioctl", Place::new(&context.name, None), &error.into())
        })?;
        Ok(Arc::new(context))
    }
}

/// Who else a device's atomics are atomic to, see the InfiniBand specification,
/// "atomic operation capability".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Atomicity {
    /// The device has no atomics.
    None,
    /// Only to the atomics of this same device.
    Hca,
    /// To the CPU's too.
    Global,
}

/// The limits of a device that farcell heeds.
#[derive(Clone, Debug)]
pub struct Attributes {
    /// The firmware's version, empty where there is none.
    pub firmware: String,
    /// Who its atomics are atomic to.
    pub atomicity: Atomicity,
    /// The most work requests in one queue.
    pub max_queue_depth: u32,
    /// The most completion queue entries.
    pub max_completions: u32,
    /// The most READs and atomics that a queue pair can have outstanding.
    pub max_initiator_depth: u8,
    /// The most READs and atomics that a queue pair can answer at a time.
    pub max_responder_depth: u8,
    /// The largest registration, in bytes.
    pub max_region_bytes: u64,
    /// The most shared receive queues; 0 means that there are none.
    pub max_shared_receive_queues: u32,
    /// The most receives in one shared receive queue.
    pub max_shared_receives: u32,
    /// The number of ports, counted from 1.
    pub ports: u8,
}

impl Attributes {
    fn new(attr: &sys::ibv_device_attr) -> Self {
        let count = |value: i32| u32::try_from(value).unwrap_or(0);
        let depth = |value: i32| u8::try_from(value.clamp(0, 255)).unwrap_or(0);
        let firmware: Vec<u8> = attr
            .fw_ver
            .iter()
            .map(|&byte| byte.cast_unsigned())
            .take_while(|&byte| byte != 0)
            .collect();
        Self {
            firmware: String::from_utf8_lossy(&firmware).into_owned(),
            atomicity: match attr.atomic_cap {
                sys::IBV_ATOMIC_HCA => Atomicity::Hca,
                sys::IBV_ATOMIC_GLOB => Atomicity::Global,
                _ => Atomicity::None,
            },
            max_queue_depth: count(attr.max_qp_wr),
            max_completions: count(attr.max_cqe),
            max_initiator_depth: depth(attr.max_qp_init_rd_atom),
            max_responder_depth: depth(attr.max_qp_rd_atom),
            max_region_bytes: attr.max_mr_size,
            max_shared_receive_queues: count(attr.max_srq),
            max_shared_receives: count(attr.max_srq_wr),
            ports: attr.phys_port_cnt,
        }
    }
}

/// An open device.
pub struct Context {
    library: &'static sys::Library,
    raw: NonNull<sys::ibv_context>,
    name: String,
    attributes: Attributes,
    transport: Transport,
    generation: Generation,
}

// SAFETY: libibverbs locks what its objects share; its functions may be called
// from any thread, verbs(7).
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Context {
    /// The device's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The device's limits, as they were when it was opened.
    #[must_use]
    pub fn attributes(&self) -> &Attributes {
        &self.attributes
    }

    /// How the device talks.
    #[must_use]
    pub fn transport(&self) -> Transport {
        self.transport
    }

    /// Whether this handle may be used: false in a child that was forked after
    /// it was opened. One load, no system call.
    #[inline]
    #[must_use]
    pub fn is_ours(&self) -> bool {
        sys::fork::generation() == self.generation
    }

    #[inline]
    pub(super) fn library(&self) -> &'static sys::Library {
        self.library
    }

    pub(super) fn raw(&self) -> NonNull<sys::ibv_context> {
        self.raw
    }

    pub(super) fn place(&self, port: Option<u8>) -> Place {
        Place::new(&self.name, port)
    }

    /// Refuses in a forked child.
    #[inline]
    pub(super) fn check(&self) -> Result<(), Error> {
        if self.is_ours() { Ok(()) } else { Err(Error::Forked { device: self.name.clone() }) }
    }

    /// For a `Drop`: carries out `destroy`, unless this is a forked child, and
    /// logs what it answers.
    pub(super) fn destroy(&self, destroy: impl FnOnce() -> Result<(), sys::CallError>) -> bool {
        if !self.is_ours() {
            return false;
        }
        match destroy() {
            Ok(()) => true,
            Err(error) => {
                tracing::warn!(target: "farcell::rdma", device = self.name, "{error}: left to the end of the process");
                false
            }
        }
    }
}

impl AsFd for Context {
    /// The descriptor that becomes readable with an asynchronous event.
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the library keeps it open until the device is closed, which
        // needs `self` gone.
        unsafe { BorrowedFd::borrow_raw((*self.raw.as_ptr()).async_fd) }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: whatever was made from it held an Arc to it and is gone.
        self.destroy(|| unsafe { self.library.close_device(self.raw) });
    }
}
