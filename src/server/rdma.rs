//! The RDMA endpoint: what each session gets to reach the cells by itself.

use super::loopback::LoopLane;
use crate::auth::{Access as Rights, Domain};
use crate::engine::lock;
use crate::layout::HEADER_BYTES;
use crate::rdma::{Adapter, random_psn, read_offer};
use crate::segment::{Payload, Segment};
use crate::verbs::{
    Access, Atomicity, Completion, CompletionChannel, CompletionQueue, Error, Gid, Memory, Notify,
    Place, ProtectionDomain, QueuePair, QueuePairConfig, Receive, Region, Request,
    SharedReceiveQueue, UnconnectedQueuePair, Work, may_lock_freely, memlock_limit, pinned_bytes,
};
use crate::wire::{LaneRecord, Tag};
use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

/// Doorbells of one session that may wait for the server's CPU.
const DOORBELLS: u32 = 64;
/// Events that are taken before others have their turn.
const EVENTS_IN_TURN: usize = 64;
/// Looks at one session's completions, 16 at a time, before others have their
/// turn.
const POLLS_IN_TURN: usize = 16;
/// Notifications to one session that may be under way.
const NOTES: u32 = 32;
/// Largest frame that goes to a client as a notification.
pub(crate) const NOTE_BYTES: usize = 256;
/// With room for fewer clients than this, the limit of locked memory is worth a
/// warning.
const FEW_CLIENTS: u64 = 64;
/// A client that does not answer for this long is reached over TCP.
const DEAD_AFTER: Duration = Duration::from_secs(1);

/// What one session has of the adapter. Dropping it takes it all away.
#[derive(Debug)]
struct Peer {
    lanes: Vec<QueuePair>,
    completions: Arc<CompletionQueue>,
    bells: Arc<SharedReceiveQueue>,
    /// The segment's header, registered for this session alone.
    _header: Arc<Region>,
    /// Its cells, likewise.
    region: Arc<Region>,
    /// What a registration lets the session do.
    writes: bool,
    /// Messages, registered likewise.
    slots: Mutex<Vec<(Weak<Payload>, Arc<Region>)>>,
}

impl Peer {
    /// Nothing that the client has sent is carried out behind this, also while
    /// someone still holds the peer.
    fn shut(&self) {
        for lane in &self.lanes {
            if let Err(error) = lane.shut() {
                tracing::warn!(target: "farcell::rdma", %error, "cannot shut a client's queue pair");
            }
        }
    }
}

/// Waits until nobody uses the peer any more, which is never for long, and
/// destroys its queue pairs.
fn destroy(peer: Arc<Peer>) {
    let mut peer = Some(peer);
    for _ in 0..10_000 {
        match peer.take().map(Arc::try_unwrap) {
            Some(Err(shared)) => peer = Some(shared),
            _ => return,
        }
        std::thread::sleep(Duration::from_micros(100));
    }
    tracing::error!(target: "farcell::rdma", "a client's queue pairs are still in use after a second");
}

/// The server's RDMA endpoint.
#[derive(Debug)]
pub(super) struct Rdma {
    pub(super) adapter: Adapter,
    pub(super) segment: Arc<Segment>,
    channel: Arc<CompletionChannel>,
    pub(super) domain: Domain,
    peers: Mutex<HashMap<u64, Arc<Peer>>>,
    /// Sessions that are being connected.
    connecting: Mutex<HashSet<u64>>,
    /// The adapter has failed, and with it every client's connection: from
    /// here on the CPU is the only one that changes cells.
    pub(super) failed: AtomicBool,
    /// Sessions whose connection went with the adapter and who may be short of
    /// a notification.
    orphans: Mutex<Vec<u64>>,
    /// Sessions with completions left over from the last turn.
    unfinished: Mutex<Vec<u64>>,
}

impl Rdma {
    /// Opens a device. Its clients' atomics count if the device has any and
    /// `cpu` does not say otherwise.
    pub fn open(named: Option<&str>, segment: &Arc<Segment>, cpu: bool) -> Result<Rdma, Error> {
        let adapter = Adapter::open(named)?;
        let channel = CompletionChannel::new(&adapter.context)?;
        let domain = match adapter.context.attributes().atomicity {
            Atomicity::Hca if !cpu => Domain::Hca,
            _ => Domain::Cpu,
        };
        // Once now, so that a limit that is too small is found at the start.
        let trial = ProtectionDomain::new(&adapter.context)?;
        let memory: Arc<dyn Memory> = segment.clone();
        Region::register(&trial, memory, Access::LOCAL | Access::REMOTE_READ)?;
        Ok(Rdma {
            adapter,
            segment: segment.clone(),
            channel,
            domain,
            peers: Mutex::default(),
            connecting: Mutex::default(),
            failed: AtomicBool::new(false),
            orphans: Mutex::default(),
            unfinished: Mutex::default(),
        })
    }

    /// Who changes the cells.
    pub fn domain(&self) -> Domain {
        self.domain
    }

    /// Warns when the limit of locked memory leaves room for few clients, each of
    /// which has the segment registered once more.
    ///
    /// # Errors
    /// [`Error::Memlock`]: for none at all.
    pub fn check_memlock(&self) -> Result<(), Error> {
        let Some(limit) = memlock_limit().filter(|_| !may_lock_freely()) else {
            return Ok(());
        };
        let pinned = pinned_bytes();
        let needed = self.segment.len() as u64;
        let fit = limit.saturating_sub(pinned.unwrap_or(0)) / needed;
        if fit == 0 {
            return Err(Error::Memlock {
                place: Place { device: self.adapter.context.name().to_owned(), port: None },
                limit,
                needed,
                pinned,
                errno: farcell_sys::libc::ENOMEM,
            });
        }
        if fit < FEW_CLIENTS {
            tracing::warn!(
                target: "farcell::rdma", "the limit of locked memory leaves room for {fit} RDMA clients; others go on \
                 over TCP: ulimit -l unlimited (or LimitMEMLOCK=infinity, or --ulimit memlock=-1)"
            );
        }
        Ok(())
    }

    /// For messages: device and port.
    pub fn place(&self) -> String {
        format!("{} port {}", self.adapter.context.name(), self.adapter.port)
    }

    /// Becomes readable when a client has rung, or a notification is through.
    pub fn events(&self) -> BorrowedFd<'_> {
        self.channel.as_fd()
    }

    /// Makes a session's end of its connections. System calls, and it may take
    /// seconds to find the way to the client, so not for an event loop.
    pub fn connect(
        &self,
        session: u64,
        rights: Rights,
        offer: &[u8],
        local: Option<IpAddr>,
    ) -> Result<Vec<u8>, String> {
        let (offer, offered) =
            read_offer(Tag::RdmaOpen, offer).ok_or("the server: the offer makes no sense")?;
        if !lock(&self.connecting).insert(session) {
            return Err("the server: another attempt of this session is under way".to_owned());
        }
        self.close(session);
        let made = self.try_connect(session, rights, &offer, &offered, local);
        lock(&self.connecting).remove(&session);
        // So that the client does not look for it on its own side.
        let (peer, answer) = made.map_err(|e| format!("the server: {e}"))?;
        lock(&self.peers).insert(session, Arc::new(peer));
        // Acquire: see `fail`. Looked at behind the insertion, so either this
        // or `fail` takes the new peer away.
        if self.failed.load(Ordering::Acquire) {
            self.close(session);
            return Err("the server's adapter has failed".to_owned());
        }
        Ok(answer)
    }

    /// The adapter has failed: takes every client's connection away, and lets
    /// the CPU change the cells from then on. `lanes` are all of the server's
    /// own, which nobody is at work on.
    pub(super) fn fail(&self, error: &Error, lanes: &mut [MutexGuard<'_, LoopLane>]) {
        tracing::error!(target: "farcell::rdma", %error, "the adapter failed; all clients go on over TCP");
        // A queue pair that is destroyed has come to rest, what an earlier
        // request has left in the adapter included. One that is only shut may
        // be in the middle of an atomic.
        for lane in lanes {
            lane.queues = None;
        }
        // Locked until it is known that there must be no more of them.
        let mut peers = lock(&self.peers);
        for (session, peer) in peers.drain() {
            peer.shut();
            lock(&self.orphans).push(session);
            destroy(peer);
        }
        // Release: no connection is left when this is seen.
        self.failed.store(true, Ordering::Release);
        drop(peers);
    }

    /// Sessions that have lost their connection since the last call.
    pub fn take_orphans(&self) -> Vec<u64> {
        std::mem::take(&mut *lock(&self.orphans))
    }

    fn try_connect(
        &self,
        session: u64,
        rights: Rights,
        offer: &crate::wire::RdmaRecord,
        offered: &[LaneRecord],
        local: Option<IpAddr>,
    ) -> Result<(Peer, Vec<u8>), Error> {
        let context = &self.adapter.context;
        // A domain and a registration of its own: the key works on this
        // session's queue pairs only, and dies with them.
        let pd = ProtectionDomain::new(context)?;
        let access = match (rights, self.domain) {
            (Rights::ReadWrite, Domain::Hca) => Access::REMOTE_READ | Access::REMOTE_ATOMIC,
            _ => Access::REMOTE_READ,
        };
        let memory: Arc<dyn Memory> = self.segment.clone();
        let mine =
            if access.contains(Access::REMOTE_ATOMIC) { access | Access::LOCAL } else { access };
        // The header can be read and nothing else, by whomever: every client
        // looks at it before it trusts RDMA.
        let (first, behind) = (0..HEADER_BYTES, HEADER_BYTES..memory.len());
        let header = Region::register_part(&pd, memory.clone(), first, Access::REMOTE_READ)?;
        let region = Region::register_part(&pd, memory, behind, mine)?;
        let entries = DOORBELLS + NOTES * offered.len() as u32;
        let completions = CompletionQueue::new(context, entries, Some((&self.channel, session)))?;
        let bells = SharedReceiveQueue::new(&pd, &completions, DOORBELLS, 0)?;
        let gid = if self.adapter.by_lid() {
            None
        } else {
            Some(self.adapter.address_for(Gid(offer.gid), local)?)
        };
        let (index, gid) = gid.map_or((0, Gid::default()), |entry| (entry.index, entry.gid));
        let mut record = self.adapter.describe(gid);
        record.address = header.remote_address();
        record.header_key = header.remote_key();
        record.key = region.remote_key();
        record.atomics = u8::from(access.contains(Access::REMOTE_ATOMIC));
        let mut answer = bytemuck::bytes_of(&record).to_vec();
        let mut lanes = Vec::new();
        for lane in offered {
            let config = QueuePairConfig {
                port: self.adapter.port,
                depth: NOTES,
                inline_bytes: NOTE_BYTES as u32,
                // The doorbell is a write, if one of no bytes.
                access: access | Access::REMOTE_WRITE,
                psn: random_psn(),
                completions: &completions,
                receive: Receive::Shared(&bells),
            };
            let queue = UnconnectedQueuePair::new(&pd, &config)?;
            let end = queue.endpoint(gid)?;
            lanes.push(self.adapter.connect(queue, index, offer, lane, DEAD_AFTER)?);
            let record = LaneRecord { queue_pair: end.queue_pair, psn: end.psn };
            answer.extend_from_slice(bytemuck::bytes_of(&record));
        }
        completions.arm(Notify::Any)?;
        let writes = rights == Rights::ReadWrite;
        let slots = Mutex::default();
        let peer = Peer { lanes, completions, bells, _header: header, region, writes, slots };
        Ok((peer, answer))
    }

    /// Registers messages for a session: address and key. Pins them all, which
    /// takes time, so not for an event loop.
    pub fn register(&self, session: u64, payload: &Arc<Payload>) -> Result<(u64, u32), String> {
        let peer = lock(&self.peers).get(&session).cloned().ok_or("the session has no RDMA")?;
        let mut slots = lock(&peer.slots);
        if let Some((_, region)) =
            slots.iter().find(|(known, _)| known.as_ptr() == Arc::as_ptr(payload))
        {
            return Ok((region.remote_address(), region.remote_key()));
        }
        let access = match peer.writes {
            true => Access::LOCAL | Access::REMOTE_READ | Access::REMOTE_WRITE,
            false => Access::REMOTE_READ,
        };
        let memory: Arc<dyn Memory> = payload.clone();
        let region = Region::register(peer.region.domain(), memory, access);
        let region = region.map_err(|e| e.to_string())?;
        let found = (region.remote_address(), region.remote_key());
        slots.push((Arc::downgrade(payload), region));
        Ok(found)
    }

    /// Takes a session's connections away. When this returns, nothing of this
    /// session can reach the cells any more.
    pub fn close(&self, session: u64) {
        let peer = lock(&self.peers).remove(&session);
        if let Some(peer) = peer {
            peer.shut();
            destroy(peer);
        }
    }

    /// Breaks every session's connections, and tells nobody.
    pub fn break_queue_pairs(&self) {
        for peer in lock(&self.peers).values() {
            peer.shut();
        }
    }

    /// Sends a frame to a session's client by its queue pair. `false`: it has
    /// none, or it does not take it; the frame must go another way.
    pub fn notify(&self, session: u64, frame: &[u8]) -> bool {
        if frame.len() > NOTE_BYTES {
            return false;
        }
        let Some(peer) = lock(&self.peers).get(&session).cloned() else {
            return false;
        };
        let Some(lane) = peer.lanes.first() else {
            return false;
        };
        if frame.len() as u32 > lane.max_inline() || lane.outstanding() + 4 > lane.depth() {
            return false;
        }
        let work = Work::SendInline { bytes: frame, immediate: None };
        lane.post(Request::new(work).solicited()).is_ok()
    }

    /// Takes what the channel has, but no more than a turn's share of it: the
    /// cells that were rung, and the sessions whose connection is broken. `true`:
    /// there may be more, which raises no event.
    pub fn take_events(&self, rung: &mut Vec<u32>, broken: &mut Vec<u64>) -> bool {
        // Those that had more than their share in the turn before.
        for session in std::mem::take(&mut *lock(&self.unfinished)) {
            self.take_completions(session, rung, broken);
        }
        for _ in 0..EVENTS_IN_TURN {
            match self.channel.next() {
                Ok(Some(session)) => self.take_completions(session, rung, broken),
                Ok(None) => return !lock(&self.unfinished).is_empty(),
                Err(error) => {
                    tracing::warn!(target: "farcell::rdma", %error, "the adapter's events cannot be read");
                    return false;
                }
            }
        }
        true
    }

    fn take_completions(&self, session: u64, rung: &mut Vec<u32>, broken: &mut Vec<u64>) {
        let Some(peer) = lock(&self.peers).get(&session).cloned() else {
            return;
        };
        // Armed first, then emptied: what comes in between raises an event.
        if let Err(error) = peer.completions.arm(Notify::Any) {
            tracing::warn!(target: "farcell::rdma", %error, session, "cannot wait for a client's doorbells");
            broken.push(session);
            return;
        }
        let mut batch = [Completion::default(); 16];
        for _ in 0..POLLS_IN_TURN {
            let n = match peer.completions.poll(&mut batch) {
                Ok(0) => return,
                Ok(n) => n,
                Err(error) => {
                    tracing::warn!(target: "farcell::rdma", %error, session, "a client's doorbells are lost");
                    broken.push(session);
                    return;
                }
            };
            for completion in &batch[..n] {
                if completion.is_receive() {
                    match peer.bells.received(completion) {
                        Ok(received) => {
                            rung.extend(received.immediate);
                            if let Err(error) = peer.bells.repost(received.slot) {
                                tracing::warn!(target: "farcell::rdma", %error, session, "cannot take further doorbells");
                            }
                        }
                        Err(_) => broken.push(session),
                    }
                } else {
                    for lane in &peer.lanes {
                        if lane.number() == completion.queue_pair()
                            && lane.retire(completion).is_err()
                        {
                            broken.push(session);
                        }
                    }
                }
            }
        }
        // A client that rings without end must not keep the others waiting.
        lock(&self.unfinished).push(session);
    }
}
