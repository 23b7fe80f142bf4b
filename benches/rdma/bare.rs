//! The floor: one queue pair, driven through the C library's own calls in the
//! leanest way, with nothing in between. Its peer is made with the safe layer:
//! it does nothing but exist.

use farcell::verbs::{
    self, Access, CompletionQueue, Connect, Context, DeviceList, Gid, GidKind, LinkLayer,
    ProtectionDomain, QueuePair, QueuePairConfig, Receive, Region, UnconnectedQueuePair,
};
use farcell_sys as sys;
use std::ffi::c_int;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Requests that may be outstanding.
pub const DEPTH: u32 = 128;

const PORT: u8 = 1;
const PSN: u32 = 0x1234;
/// Requests that are posted with one call when many are under way.
const LIST: usize = 16;

type PostSend = unsafe extern "C" fn(
    *mut sys::ibv_qp,
    *mut sys::ibv_send_wr,
    *mut *mut sys::ibv_send_wr,
) -> i32;
type PollCq = unsafe extern "C" fn(*mut sys::ibv_cq, c_int, *mut sys::ibv_wc) -> c_int;

/// What to ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ask {
    /// READ of 8 bytes.
    Read,
    /// Fetch-and-add of 1.
    Add,
    /// Compare-and-swap.
    Swap(u64, u64),
}

/// A connected queue pair, and a peer with a page of cells.
pub struct Bare {
    post: PostSend,
    poll: PollCq,
    queue: *mut sys::ibv_qp,
    completions: *mut sys::ibv_cq,
    memory: verbs::Pages,
    local_key: u32,
    remote: u64,
    remote_key: u32,
    // Never destroyed: the process ends with the measurement.
    _peer: (QueuePair, Arc<CompletionQueue>, Arc<Region>),
}

impl Bare {
    /// Opens the first device, or the one that `FARCELL_DEVICE` names.
    pub fn open() -> Result<Bare, Box<dyn std::error::Error>> {
        let library = verbs::library()?;
        let list = DeviceList::new(library)?;
        let wanted = std::env::var("FARCELL_DEVICE").ok();
        let name = match wanted.as_deref().and_then(|w| w.split(':').next()) {
            Some(name) => name.to_owned(),
            None => list.iter().next().ok_or("no device")?.name().to_owned(),
        };
        let context = list.find(&name)?.open()?;
        let port = context.active_port(PORT)?;
        let (gid, index) = address(&context, port.link_layer)?;
        let attributes = context.attributes();
        let depth = attributes.max_initiator_depth.min(attributes.max_responder_depth);

        // The peer.
        let domain = ProtectionDomain::new(&context)?;
        let completions = CompletionQueue::new(&context, 16, None)?;
        let access = Access::LOCAL | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
        let cells = Region::pages(&domain, 4096, access)?;
        let config = QueuePairConfig {
            port: PORT,
            depth: 8,
            inline_bytes: 0,
            access,
            psn: PSN,
            completions: &completions,
            receive: Receive::Nothing,
        };
        let peer = UnconnectedQueuePair::new(&domain, &config)?;
        let end = peer.endpoint(gid)?;

        // Ours, by hand.
        let memory = verbs::Pages::new(64 << 10)?;
        // SAFETY: the objects are live, made in this order, and never
        // destroyed; `memory` is as long as is told and lives as long.
        let (queue, raw_completions, local_key, context_raw) = unsafe {
            let (devices, count) = library.get_device_list()?;
            let device = (0..count)
                .filter_map(|i| NonNull::new(*devices.as_ptr().add(i)))
                .find(|device| {
                    let name_at = (&raw const (*device.as_ptr()).name).cast();
                    std::ffi::CStr::from_ptr(name_at).to_bytes() == name.as_bytes()
                })
                .ok_or("the device has gone")?;
            let raw = library.open_device(device)?;
            library.free_device_list(devices);
            let pd = library.alloc_pd(raw)?;
            let at = verbs::Memory::address(&memory).as_ptr().cast();
            let region =
                library.reg_mr(pd, at, verbs::Memory::len(&memory), sys::IBV_ACCESS_LOCAL_WRITE)?;
            let cq = library.create_cq(raw, DEPTH.cast_signed(), ptr::null_mut(), None, 0)?;
            let mut attr = sys::ibv_qp_init_attr {
                qp_context: ptr::null_mut(),
                send_cq: cq.as_ptr(),
                recv_cq: cq.as_ptr(),
                srq: ptr::null_mut(),
                cap: sys::ibv_qp_cap {
                    max_send_wr: DEPTH,
                    max_recv_wr: 1,
                    max_send_sge: 1,
                    max_recv_sge: 1,
                    max_inline_data: 0,
                },
                qp_type: sys::IBV_QPT_RC,
                sq_sig_all: 0,
            };
            let queue = library.create_qp(pd, &mut attr)?;
            bring_up(library, queue, &end, index, port.mtu.bytes(), depth)?;
            (queue, cq, (*region.as_ptr()).lkey, raw)
        };
        // SAFETY: made above.
        let number = unsafe { (*queue.as_ptr()).qp_num };
        let lid = port.lid;
        let mut connect =
            Connect::to(verbs::Endpoint { queue_pair: number, psn: PSN, lid, gid }, index);
        connect.mtu = port.mtu;
        connect.initiator_depth = depth;
        connect.responder_depth = depth;
        let peer = peer.connect(&connect)?;
        // SAFETY: the context is open and stays so.
        let ops = unsafe { (*context_raw.as_ptr()).ops };
        Ok(Bare {
            post: ops.post_send.ok_or("no post_send")?,
            poll: ops.poll_cq.ok_or("no poll_cq")?,
            queue: queue.as_ptr(),
            completions: raw_completions.as_ptr(),
            memory,
            local_key,
            remote: cells.remote_address(),
            remote_key: cells.remote_key(),
            _peer: (peer, completions, cells),
        })
    }

    /// Carries out one request and returns the word that it brought.
    #[inline]
    pub fn run(&mut self, ask: Ask) -> u64 {
        let mut entry = self.entry(0);
        let mut request = self.request(ask, &mut entry);
        request.send_flags = sys::IBV_SEND_SIGNALED;
        let mut bad = ptr::null_mut();
        // SAFETY: live objects; the request and its entry outlive the call.
        let posted = unsafe { (self.post)(self.queue, &raw mut request, &raw mut bad) };
        assert_eq!(posted, 0, "ibv_post_send");
        self.next();
        self.word(0)
    }

    /// Waits for the next completion.
    #[inline]
    fn next(&mut self) {
        let mut completion = sys::ibv_wc::default();
        loop {
            // SAFETY: a live queue; room for one completion.
            match unsafe { (self.poll)(self.completions, 1, &raw mut completion) } {
                0 => {}
                1 => break,
                other => panic!("ibv_poll_cq: {other}"),
            }
        }
        assert_eq!(completion.status, sys::IBV_WC_SUCCESS, "a request failed");
    }

    /// Carries out `count` requests, up to `depth` of them under way all the
    /// time: lists of requests with one call, the last of each signalled.
    pub fn stream(&mut self, ask: Ask, depth: usize, count: usize) {
        let list = LIST.min(depth.div_ceil(4));
        let most = depth / list;
        let mut under_way = 0;
        let mut left = count;
        while left > 0 || under_way > 0 {
            if left == 0 || under_way == most {
                self.next();
                under_way -= 1;
                continue;
            }
            let n = list.min(left);
            let mut entries: [sys::ibv_sge; LIST] = std::array::from_fn(|i| self.entry(i));
            let mut requests: [sys::ibv_send_wr; LIST] =
                std::array::from_fn(|i| self.request(ask, &mut entries[i]));
            let first = requests.as_mut_ptr();
            for i in 1..n {
                // SAFETY: both are inside `requests`.
                unsafe { (*first.add(i - 1)).next = first.add(i) };
            }
            requests[n - 1].send_flags = sys::IBV_SEND_SIGNALED;
            let mut bad = ptr::null_mut();
            // SAFETY: live objects; the requests and entries outlive the call.
            let posted = unsafe { (self.post)(self.queue, requests.as_mut_ptr(), &raw mut bad) };
            assert_eq!(posted, 0, "ibv_post_send");
            left -= n;
            under_way += 1;
        }
    }

    #[inline]
    fn entry(&self, index: usize) -> sys::ibv_sge {
        let at = verbs::Memory::address(&self.memory).as_ptr().expose_provenance();
        sys::ibv_sge { addr: (at + index * 8) as u64, length: 8, lkey: self.local_key }
    }

    #[inline]
    fn word(&self, index: usize) -> u64 {
        let at = verbs::Memory::address(&self.memory).cast::<AtomicU64>();
        // SAFETY: mapped and aligned; atomic, since the device writes to it.
        unsafe { (*at.as_ptr().add(index)).load(Ordering::Relaxed) }
    }

    #[inline]
    fn request(&self, ask: Ask, entry: &mut sys::ibv_sge) -> sys::ibv_send_wr {
        let atomic = |compare_add, swap| sys::ibv_send_wr_wr {
            atomic: sys::ibv_send_wr_atomic {
                remote_addr: self.remote,
                compare_add,
                swap,
                rkey: self.remote_key,
            },
        };
        let (opcode, wr) = match ask {
            Ask::Read => (
                sys::IBV_WR_RDMA_READ,
                sys::ibv_send_wr_wr {
                    rdma: sys::ibv_send_wr_rdma { remote_addr: self.remote, rkey: self.remote_key },
                },
            ),
            Ask::Add => (sys::IBV_WR_ATOMIC_FETCH_AND_ADD, atomic(1, 0)),
            Ask::Swap(compare, swap) => (sys::IBV_WR_ATOMIC_CMP_AND_SWP, atomic(compare, swap)),
        };
        sys::ibv_send_wr {
            wr_id: 0,
            next: ptr::null_mut(),
            sg_list: entry,
            num_sge: 1,
            opcode,
            send_flags: 0,
            imm_data: 0,
            wr,
            xrc_remote_srqn: 0,
            unused: [0; 6],
        }
    }
}

/// The address by which a peer on this port is reached, and its place.
fn address(context: &Context, layer: LinkLayer) -> Result<(Gid, u8), Box<dyn std::error::Error>> {
    if layer == LinkLayer::InfiniBand {
        return Ok((Gid::default(), 0));
    }
    let mut gids = context.gids(PORT)?;
    gids.retain(|g| g.netdev_here != Some(false) && !g.gid.is_zero());
    gids.sort_by_key(|g| (g.kind != GidKind::RoceV2, g.gid.is_link_local(), g.index));
    let best = gids.first().ok_or("no GID")?;
    Ok((best.gid, u8::try_from(best.index)?))
}

/// RESET to ready-to-send.
///
/// # Safety
/// A live queue pair that was just made.
unsafe fn bring_up(
    library: &sys::Library,
    queue: NonNull<sys::ibv_qp>,
    peer: &verbs::Endpoint,
    gid_index: u8,
    mtu: u32,
    depth: u8,
) -> Result<(), sys::CallError> {
    let mut init =
        sys::ibv_qp_attr { qp_state: sys::IBV_QPS_INIT, port_num: PORT, ..Default::default() };
    let mask =
        sys::IBV_QP_STATE | sys::IBV_QP_PKEY_INDEX | sys::IBV_QP_PORT | sys::IBV_QP_ACCESS_FLAGS;
    // SAFETY: the caller's, here and below.
    unsafe { library.modify_qp(queue, &mut init, mask)? };
    let mut receive = sys::ibv_qp_attr {
        qp_state: sys::IBV_QPS_RTR,
        // 256 bytes is 1, and each step doubles.
        path_mtu: mtu.ilog2() - 7,
        dest_qp_num: peer.queue_pair,
        rq_psn: peer.psn,
        max_dest_rd_atomic: depth,
        min_rnr_timer: 12,
        ah_attr: sys::ibv_ah_attr {
            grh: sys::ibv_global_route {
                dgid: sys::ibv_gid { raw: peer.gid.0 },
                sgid_index: gid_index,
                hop_limit: 64,
                ..Default::default()
            },
            dlid: peer.lid,
            is_global: u8::from(!peer.gid.is_zero()),
            port_num: PORT,
            ..Default::default()
        },
        ..Default::default()
    };
    let mask = sys::IBV_QP_STATE
        | sys::IBV_QP_AV
        | sys::IBV_QP_PATH_MTU
        | sys::IBV_QP_DEST_QPN
        | sys::IBV_QP_RQ_PSN
        | sys::IBV_QP_MAX_DEST_RD_ATOMIC
        | sys::IBV_QP_MIN_RNR_TIMER;
    // SAFETY: as above.
    unsafe { library.modify_qp(queue, &mut receive, mask)? };
    let mut send = sys::ibv_qp_attr {
        qp_state: sys::IBV_QPS_RTS,
        sq_psn: PSN,
        timeout: 14,
        retry_cnt: 6,
        rnr_retry: 7,
        max_rd_atomic: depth,
        ..Default::default()
    };
    let mask = sys::IBV_QP_STATE
        | sys::IBV_QP_SQ_PSN
        | sys::IBV_QP_TIMEOUT
        | sys::IBV_QP_RETRY_CNT
        | sys::IBV_QP_RNR_RETRY
        | sys::IBV_QP_MAX_QP_RD_ATOMIC;
    // SAFETY: as above.
    unsafe { library.modify_qp(queue, &mut send, mask) }
}

/// The safe layer alone: a queue pair of its own, and nothing above it.
pub struct Safe {
    queue: QueuePair,
    completions: Arc<CompletionQueue>,
    buffer: Arc<Region>,
    at: verbs::Remote,
    _peer: (QueuePair, Arc<CompletionQueue>, Arc<Region>),
}

impl Safe {
    /// On the first device, or the one that `FARCELL_DEVICE` names.
    pub fn open() -> Result<Safe, Box<dyn std::error::Error>> {
        let list = DeviceList::new(verbs::library()?)?;
        let wanted = std::env::var("FARCELL_DEVICE").ok();
        let name = match wanted.as_deref().and_then(|w| w.split(':').next()) {
            Some(name) => name.to_owned(),
            None => list.iter().next().ok_or("no device")?.name().to_owned(),
        };
        let context = list.find(&name)?.open()?;
        let port = context.active_port(PORT)?;
        let (gid, index) = address(&context, port.link_layer)?;
        let domain = ProtectionDomain::new(&context)?;
        let access = Access::LOCAL | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
        let cells = Region::pages(&domain, 4096, access)?;
        let buffer = Region::pages(&domain, 64 << 10, Access::LOCAL)?;
        let end = |access| -> Result<_, verbs::Error> {
            let completions = CompletionQueue::new(&context, DEPTH, None)?;
            let config = QueuePairConfig {
                port: PORT,
                depth: DEPTH,
                inline_bytes: 0,
                access,
                psn: PSN,
                completions: &completions,
                receive: Receive::Nothing,
            };
            let queue = UnconnectedQueuePair::new(&domain, &config)?;
            let end = queue.endpoint(gid)?;
            Ok((queue, end, completions))
        };
        let (near, near_end, completions) = end(Access::NONE)?;
        let (far, far_end, far_completions) = end(access)?;
        let connect = |queue: UnconnectedQueuePair, to| {
            let mut connect = Connect::to(to, index);
            connect.mtu = port.mtu;
            connect.initiator_depth = 8;
            connect.responder_depth = 8;
            queue.connect(&connect)
        };
        let (queue, peer) = (connect(near, far_end)?, connect(far, near_end)?);
        let at = verbs::Remote { address: cells.remote_address(), key: cells.remote_key() };
        Ok(Safe { queue, completions, buffer, at, _peer: (peer, far_completions, cells) })
    }

    /// Carries out one request and returns the word that it brought.
    #[inline]
    pub fn run(&self, ask: Ask) -> Result<u64, verbs::Error> {
        let word = self.buffer.slice(0..8)?;
        let request = match ask {
            Ask::Read => verbs::Request::read(word, self.at),
            Ask::Add => verbs::Request::fetch_add(word, self.at, 1),
            Ask::Swap(compare, swap) => verbs::Request::compare_swap(word, self.at, compare, swap),
        };
        self.queue.post(request)?;
        let mut one = [verbs::Completion::default(); 1];
        while self.completions.poll(&mut one)? == 0 {}
        self.queue.retire(&one[0])?;
        Ok(self.buffer.words()[0].load(Ordering::Relaxed))
    }
}
