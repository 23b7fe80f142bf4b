//! Frames in and out of the clients of a worker.

use super::Shared;
use super::connection::Phase;
use super::loopback::take_unclear;
use super::meter::bump;
use super::worker::{MEMORY, Mail, READS_IN_TURN, Worker};
use crate::engine::{Next, Way, lock};
use crate::wire::slots::{RdmaSlotsAnswer, SlotsRecord};
use crate::wire::{self, Tag};
use mio::Interest;
use mio::unix::SourceFd;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// Threads that bring up RDMA for clients at a time.
const MOST_BRINGING_UP: usize = 64;
/// What further clients are told.
const BUSY: &str = "the server: it brings up RDMA for 64 others right now; connect again to try";

/// A place among those threads.
struct BringingUp(Arc<Shared>);

impl BringingUp {
    fn take(shared: &Arc<Shared>) -> Option<BringingUp> {
        // Relaxed, here and below: a count, and nothing is published by it.
        let order = Ordering::Relaxed;
        let more = |n: usize| (n < MOST_BRINGING_UP).then_some(n + 1);
        shared.bringing_up.fetch_update(order, order, more).ok()?;
        Some(BringingUp(shared.clone()))
    }
}

impl Drop for BringingUp {
    fn drop(&mut self) {
        self.0.bringing_up.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Worker {
    /// Clients have changed cells by themselves, and someone waits for them.
    pub(super) fn answer_bells(&mut self) {
        let Some(rdma) = self.shared.rdma.clone() else {
            return;
        };
        let (mut rung, mut broken) = (Vec::new(), Vec::new());
        self.bells_again = rdma.take_events(&mut rung, &mut broken);
        // Once for each cell, however often it was rung.
        rung.sort_unstable();
        rung.dedup();
        bump(&self.meter().doorbells, rung.len() as u64);
        for place in rung.into_iter().filter(|&place| place < self.shared.capacity) {
            self.shared.engine.ring(place, &mut self.out);
        }
        for session in broken {
            rdma.close(session);
            self.shared.engine.set_way(session, Way::Tcp);
            self.shared.engine.repeat(session, &mut self.out);
        }
        self.post_out();
    }

    /// A client asks for RDMA, or gives it up.
    pub(super) fn handle_rdma(&mut self, key: usize, tag: Tag, id: u64, payload: &[u8]) {
        let client = &mut self.clients[key];
        let Phase::Open { session, id: number } = &client.phase else {
            return;
        };
        let session = session.clone();
        let (number, serial) = (*number, client.serial);
        let access = {
            let mut session = lock(&session);
            if self.shared.rdma.is_some() && tag == Tag::RdmaOpen {
                session.set_one_sided();
            }
            session.access
        };
        let local = client.stream().local_addr().ok().map(|addr| addr.ip().to_canonical());
        let mut answer = Vec::new();
        match (&self.shared.rdma, tag) {
            (None, _) => {
                let why = format!("the server has none: {}", self.shared.no_rdma);
                wire::push(&mut answer, Tag::RdmaRefused, id, &[why.as_bytes()]);
            }
            (Some(rdma), Tag::RdmaClose) => {
                rdma.close(number);
                self.shared.engine.set_way(number, Way::Tcp);
                wire::push(&mut answer, Tag::RdmaRefused, id, &[b"given up"]);
                self.shared.engine.repeat(number, &mut self.out);
                self.post_out();
            }
            (Some(rdma), Tag::RdmaSlots) => {
                let array = wire::take::<SlotsRecord>(tag, payload).map(|(r, _)| r.array);
                let payload = array
                    .ok()
                    .and_then(|array| self.shared.engine.slot_payload(&lock(&session), array));
                let (rdma, shared) = (rdma.clone(), self.shared.clone());
                let (route, worker) = (self.route(key, serial), self.index);
                let Some(place) = BringingUp::take(&self.shared) else {
                    wire::push(&mut answer, Tag::RdmaRefused, id, &[BUSY.as_bytes()]);
                    return self.send(key, &answer);
                };
                let register = move || {
                    let _place = place;
                    let made = payload
                        .ok_or_else(|| "no array of slots has that number".to_owned())
                        .and_then(|payload| rdma.register(number, &payload));
                    let mut answer = Vec::new();
                    match made {
                        Ok((address, key)) => {
                            let record = RdmaSlotsAnswer { address, key, reserved: 0 };
                            let bytes = bytemuck::bytes_of(&record);
                            wire::push(&mut answer, Tag::RdmaSlotsOpened, id, &[bytes]);
                        }
                        Err(why) => {
                            tracing::info!(session = number, why, "no messages by RDMA");
                            wire::push(&mut answer, Tag::RdmaRefused, id, &[why.as_bytes()]);
                        }
                    }
                    shared.mailboxes[worker].post(Mail::Send(route, answer));
                };
                let thread = std::thread::Builder::new().name("farcell-register".to_owned());
                if let Err(error) = thread.spawn(register) {
                    let why = format!("the server cannot start a thread: {error}");
                    wire::push(&mut answer, Tag::RdmaRefused, id, &[why.as_bytes()]);
                }
            }
            (Some(rdma), _) => {
                // The way to the client may take seconds to be found.
                let (rdma, shared) = (rdma.clone(), self.shared.clone());
                let (offer, route, worker) =
                    (payload.to_vec(), self.route(key, serial), self.index);
                let Some(place) = BringingUp::take(&self.shared) else {
                    wire::push(&mut answer, Tag::RdmaRefused, id, &[BUSY.as_bytes()]);
                    return self.send(key, &answer);
                };
                let connect = move || {
                    let _place = place;
                    let made = rdma.connect(number, access, &offer, local);
                    if made.is_ok() {
                        shared.engine.set_way(number, Way::Rdma);
                    }
                    if !shared.engine.has(number) {
                        rdma.close(number);
                    }
                    let mut answer = Vec::new();
                    match made {
                        Ok(bytes) => wire::push(&mut answer, Tag::RdmaOpened, id, &[&bytes]),
                        Err(why) => {
                            tracing::info!(session = number, why, "no RDMA for a client");
                            wire::push(&mut answer, Tag::RdmaRefused, id, &[why.as_bytes()]);
                        }
                    }
                    shared.mailboxes[worker].post(Mail::Send(route, answer));
                };
                let thread = std::thread::Builder::new().name("farcell-connect".to_owned());
                if let Err(error) = thread.spawn(connect) {
                    let why = format!("the server: cannot start a thread: {error}");
                    wire::push(&mut answer, Tag::RdmaRefused, id, &[why.as_bytes()]);
                }
            }
        }
        self.send(key, &answer);
    }

    /// A client asks for the segment's memory.
    pub(super) fn handle_shm(&mut self, key: usize, id: u64) {
        let Phase::Open { session, id: number } = &self.clients[key].phase else {
            return;
        };
        let opened = {
            let mut session = lock(session);
            let opened = match &self.shared.shm {
                Ok(shm) => shm.grant(*number, session.access, Instant::now()),
                Err(why) => Err(why.clone()),
            };
            match &opened {
                Ok(record) if record.writable != 0 => session.set_writes_memory(),
                Ok(_) => session.set_one_sided(),
                Err(_) => {}
            }
            opened
        };
        let mut answer = Vec::new();
        match opened {
            Ok(record) => {
                let bytes = bytemuck::bytes_of(&record);
                wire::push(&mut answer, Tag::ShmOpened, id, &[bytes]);
            }
            Err(why) => wire::push(&mut answer, Tag::ShmRefused, id, &[why.as_bytes()]),
        }
        self.send(key, &answer);
    }

    /// A client asks for the memory of an array's messages.
    pub(super) fn handle_shm_slots(&mut self, key: usize, id: u64, payload: &[u8]) {
        let Phase::Open { session, id: number } = &self.clients[key].phase else {
            return;
        };
        let (access, messages) = {
            let session = lock(session);
            let array = wire::take::<SlotsRecord>(Tag::ShmSlots, payload).map(|(r, _)| r.array);
            let find = |array| self.shared.engine.slot_payload(&session, array);
            (session.access, array.ok().and_then(find))
        };
        let opened = match (&self.shared.shm, messages) {
            (Ok(shm), Some(messages)) => {
                shm.grant_slots(*number, access, &messages, Instant::now())
            }
            (Ok(_), None) => Err("no array of slots has that number".to_owned()),
            (Err(why), _) => Err(why.clone()),
        };
        let mut answer = Vec::new();
        match opened {
            Ok(record) => {
                let bytes = bytemuck::bytes_of(&record);
                wire::push(&mut answer, Tag::ShmSlotsOpened, id, &[bytes]);
            }
            Err(why) => wire::push(&mut answer, Tag::ShmRefused, id, &[why.as_bytes()]),
        }
        self.send(key, &answer);
    }

    /// Someone on this machine shows a token.
    pub(super) fn hand_out_memory(&mut self) {
        let Ok(shm) = &self.shared.shm else {
            return;
        };
        let engine = &self.shared.engine;
        let given = |session| engine.set_way(session, Way::Shm);
        if shm.hand_out(Instant::now(), |session| engine.has(session), given) {
            // There may be more. Edge-triggered: this asks for another event.
            let fd = shm.socket().as_raw_fd();
            let source = &mut SourceFd(&fd);
            let registry = self.poll.registry();
            if let Err(error) = registry.reregister(source, MEMORY, Interest::READABLE) {
                tracing::warn!(%error, "cannot watch the socket for shared memory");
            }
        }
    }

    /// Carries frames for other clients to them. Those of this worker first go
    /// out together, so that many wake-ups for one client are one write.
    pub(super) fn post_out(&mut self) {
        for over in std::mem::take(&mut self.out.ended) {
            // First of all: what it holds must not be freed, nor its cells given
            // to others, while its client can still change cells.
            if let Some(rdma) = &self.shared.rdma {
                rdma.close(over.id);
            }
            // Nothing of it can reach a row any more.
            self.shared.engine.end_writes(over.id, &mut self.out);
            // Before its barriers are broken: it must not arrive at one behind that.
            if let Ok(shm) = &self.shared.shm {
                shm.close(over.id);
            }
            self.shared.engine.settle(over.id, self.shared.now(), &mut self.out);
            drop(over.session);
        }
        for route in std::mem::take(&mut self.out.close) {
            let worker = (route >> 56) as usize;
            if worker != self.index {
                self.shared.mailboxes[worker].post(Mail::Close(route));
            } else {
                self.part(route);
            }
        }
        let mail = std::mem::take(&mut self.out.mail);
        let (since, mut answered) = (self.now, 0);
        let single = mail.len() == 1;
        let mut queued = Vec::new();
        for (route, frame) in mail {
            let worker = (route >> 56) as usize;
            if worker != self.index {
                self.shared.mailboxes[worker].post(Mail::Wake(route, frame, since));
            } else if let Some(key) = self.client_of(route) {
                answered += 1;
                if self.notify(key, &frame) {
                    continue;
                }
                if single {
                    self.send(key, &frame);
                } else {
                    if self.clients[key].waiting() == 0 {
                        queued.push(key);
                    }
                    self.clients[key].queue(&frame);
                }
            }
        }
        for key in queued {
            self.flush(key);
        }
        if answered > 0 {
            self.meter().woke(answered, since.elapsed());
        }
    }

    /// Sends the answer of a wait by the way that the client's operations
    /// take, if that is not TCP.
    pub(super) fn notify(&self, key: usize, frame: &[u8]) -> bool {
        match (&self.shared.rdma, &self.clients[key].phase) {
            (Some(rdma), Phase::Open { id, .. }) => rdma.notify(*id, frame),
            _ => false,
        }
    }

    pub(super) fn send(&mut self, key: usize, bytes: &[u8]) {
        let client = &mut self.clients[key];
        let sent = client.send(bytes);
        bump(&self.shared.meters[self.index].bytes_out, client.take_written());
        if let Err(error) = sent {
            tracing::debug!(%error, "cannot send to a client");
            self.close(key, "cannot be sent to");
        }
    }

    pub(super) fn flush(&mut self, key: usize) {
        let Some(client) = self.clients.get_mut(key) else {
            return;
        };
        let was_clogged = client.is_clogged();
        let sent = client.flush();
        bump(&self.shared.meters[self.index].bytes_out, client.take_written());
        if sent.is_err() {
            self.close(key, "cannot be sent to");
            return;
        }
        match client.phase {
            Phase::Closing if client.waiting() == 0 => client.finish(),
            // There was no reading while it was clogged, and there is no new
            // event for what came in meanwhile.
            _ if was_clogged && !client.is_clogged() => self.again.push((key, client.serial)),
            _ => {}
        }
    }

    /// Reads and handles what a client has sent.
    pub(super) fn receive(&mut self, key: usize) {
        if self.serve_beside(key) {
            return;
        }
        if let Some(client) = self.clients.get(key)
            && matches!(client.phase, Phase::Handshake(_))
        {
            if self.patience == 0 {
                self.again.push((key, client.serial));
                return;
            }
            self.patience -= 1;
        }
        let mut scratch = std::mem::take(&mut self.scratch);
        for turn in 0.. {
            let Some(client) = self.clients.get_mut(key) else {
                break;
            };
            if client.is_clogged() {
                break;
            }
            if turn == READS_IN_TURN {
                self.again.push((key, client.serial));
                break;
            }
            // Frames that had to wait for replies to go out come first.
            if !client.inbox.is_empty() && turn == 0 && self.handle_inbox(key) {
                continue;
            }
            let Some(client) = self.clients.get_mut(key) else {
                break;
            };
            let n = match client.read(&mut scratch) {
                Ok(0) => {
                    self.close(key, "closed the connection");
                    break;
                }
                Ok(n) => n,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Err(_) => {
                    self.close(key, "reset the connection");
                    break;
                }
            };
            bump(&self.shared.meters[self.index].bytes_in, n as u64);
            if client.inbox.is_empty() {
                let used = self.handle(key, &scratch[..n]);
                if let Some(client) = self.clients.get_mut(key) {
                    client.inbox.extend_from_slice(&scratch[used..n]);
                }
            } else {
                client.inbox.extend_from_slice(&scratch[..n]);
                self.handle_inbox(key);
            }
            // The buffer was not filled, so the socket is empty; should more
            // come, there will be another event.
            if n < scratch.len() && self.clients.get(key).is_none_or(|c| c.inbox.is_empty()) {
                break;
            }
        }
        self.scratch = scratch;
    }

    /// Handles what is in the inbox. Whether some of it was.
    pub(super) fn handle_inbox(&mut self, key: usize) -> bool {
        let mut inbox = std::mem::take(&mut self.clients[key].inbox);
        let used = self.handle(key, &inbox);
        if let Some(client) = self.clients.get_mut(key) {
            if used < inbox.len() {
                inbox.drain(..used);
                client.inbox = inbox;
            }
            return used > 0;
        }
        false
    }

    /// Handles the whole messages at the front of `bytes`, as far as the
    /// client takes the replies, and says how many bytes those were.
    pub(super) fn handle(&mut self, key: usize, bytes: &[u8]) -> usize {
        let mut total = 0;
        loop {
            let rest = &bytes[total..];
            let Some(client) = self.clients.get_mut(key) else {
                return bytes.len();
            };
            if client.is_clogged() || rest.is_empty() {
                return total;
            }
            let used = match client.phase {
                Phase::Beside(_) => {
                    // It was not asked yet.
                    self.close(key, "spoke before its turn");
                    return bytes.len();
                }
                Phase::Closing | Phase::Lapsed(_) => return bytes.len(),
                Phase::Handshake(_) => self.handle_hello(key, rest),
                Phase::Open { .. } => self.handle_frames(key, rest),
            };
            if used == 0 {
                return total;
            }
            total += used;
        }
    }

    pub(super) fn handle_frames(&mut self, key: usize, bytes: &[u8]) -> usize {
        let client = &self.clients[key];
        let Phase::Open { session, id } = &client.phase else {
            return 0;
        };
        let (id, serial) = (*id, client.serial);
        self.out.reply.clear();
        let now = self.shared.time(self.now);
        let (used, result) = {
            let mut session = lock(session);
            if session.route != Some(self.route(key, serial)) {
                drop(session);
                self.close(key, "its session has moved");
                return 0;
            }
            take_unclear();
            let handled = self.shared.engine.handle(now, &mut session, bytes, &mut self.out);
            if take_unclear() {
                self.shared.engine.forget(&mut session, &mut self.out);
            }
            handled
        };
        // Wake-ups before the reply: whoever sleeps has waited longer.
        if !self.out.mail.is_empty() || !self.out.close.is_empty() || !self.out.ended.is_empty() {
            self.post_out();
        }
        if !self.out.reply.is_empty() && self.clients.get(key).is_some_and(|c| c.serial == serial) {
            let reply = std::mem::take(&mut self.out.reply);
            self.send(key, &reply);
            self.out.reply = reply;
        }
        match result {
            Ok(Next::Continue) => {}
            Ok(Next::Close) => self.close(key, "said goodbye"),
            Ok(Next::Prepare) => {
                if self.clients.get(key).is_some_and(|c| c.serial == serial) {
                    self.prepare_first(key, serial, &bytes[used..]);
                }
            }
            Ok(Next::Way { tag, id, len }) => {
                if self.clients.get(key).is_some_and(|c| c.serial == serial) {
                    match tag {
                        Tag::ShmOpen => self.handle_shm(key, id),
                        Tag::ShmSlots => self.handle_shm_slots(key, id, &bytes[used - len..used]),
                        _ => self.handle_rdma(key, tag, id, &bytes[used - len..used]),
                    }
                }
            }
            Err(violation) => {
                if self.may_complain() {
                    tracing::warn!(session = id, "dropped a client that sent {violation}");
                }
                self.close(key, "broke the protocol");
            }
        }
        used
    }
}
