//! What a server may send to a client.

use super::link::{Link, Settings};
use super::state::{Done, Frame, Request, State, Status, Wait};
use super::{Failure, frame};
use crate::auth::{Access, Domain, Key, Welcome};
use crate::cell::Op;
use crate::engine::lock;
use crate::fuzz::Input;
use crate::transport::connect::Target;
use crate::transport::socket::Socket;
use crate::wire::{self, AcquireRecord, HEADER, Header, OpRecord, Tag};
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

/// A client in the middle of things, and the other end of its connection.
fn link() -> Option<(Arc<Link>, UnixStream)> {
    let (near, far) = UnixStream::pair().ok()?;
    far.set_nonblocking(true).ok()?;
    let target = Target {
        addr: "fuzz:1".to_owned(),
        key: Key::new(*b"fuzz").ok()?,
        key_source: String::new(),
        job: String::new(),
        tls: crate::auth::Tls::Off,
        timeout: Duration::ZERO,
    };
    let settings = Settings { target, reconnect_for: Duration::ZERO, spin: Duration::ZERO };
    let welcome = Welcome {
        access: Access::ReadWrite,
        domain: Domain::Cpu,
        resumed: false,
        offers_rdma: false,
        offers_shm: false,
        incarnation: 1 << 32 | 1,
        session: 1,
        capacity: 64,
        lease_ms: 1000,
        seat: 1,
    };
    // Only read and written: which kind of socket it is makes no difference.
    Some((Link::new(settings, Socket::plain(TcpStream::from(OwnedFd::from(near))), welcome), far))
}

fn wait(state: &mut State, tag: Tag, payload: &[u8]) {
    let id = state.next_wait;
    state.next_wait += 1;
    let mut bytes = frame(tag, &[payload]);
    bytes[8..HEADER].copy_from_slice(&id.to_le_bytes());
    let wait = Wait {
        bytes: Arc::new(bytes),
        cancelling: false,
        abandoned: false,
        answer: None,
        sleeper: None,
        bound: id.is_multiple_of(2),
        then: None,
    };
    state.waits.insert(id, wait);
}

/// The books of a client are in order, whatever was answered.
fn inspect(state: &State) {
    let open = state.calls.iter().filter(|call| !call.over);
    let bytes: usize = open.clone().map(|call| call.reply_bytes).sum();
    assert_eq!(state.unanswered_bytes, bytes, "room for answers was lost");
    let oldest = open.clone().map(|call| call.id).next();
    assert!(oldest.is_none_or(|id| state.answered < state.next_request && id < state.next_request));
    for call in open {
        assert!(matches!(call.status, Status::Pending | Status::Finished));
    }
    assert!(state.done_waits.len() <= 1 << 16);
}

/// Frames of a server's, whole or not, in answer to requests, waits and claims;
/// and the lists in them.
pub fn replies(data: &[u8]) {
    let Some((link, _far)) = link() else {
        return;
    };
    let mut input = Input(data);
    for op in [Op::Set, Op::Add, Op::Load, Op::Acquire] {
        let record = OpRecord { op: op as u8, ..OpRecord::default() };
        let request = Request {
            frame: Frame::one(&record),
            name: op.name(),
            repeatable: op.is_repeatable(),
            reads: op.is_read(),
            reply_bytes: HEADER + 8,
        };
        assert!(link.submit(request).is_ok());
    }
    {
        let mut state = lock(&link.state);
        let claim = AcquireRecord { seat: 1, ..AcquireRecord::default() };
        for _ in 0..2 {
            wait(&mut state, Tag::Wait, &[0; 32]);
            wait(&mut state, Tag::Acquire, bytemuck::bytes_of(&claim));
            wait(&mut state, Tag::ShmOpen, &[]);
        }
    }
    while !input.is_empty() {
        let [what, tag, id] = input.array();
        let payload = input.piece();
        let mut bytes = Vec::new();
        match what & 7 {
            0 => bytes.extend_from_slice(payload),
            1 => {
                let mut state = lock(&link.state);
                let _ = state.answer_or_abandon(id.into());
            }
            2 => {
                let mut state = lock(&link.state);
                state.forget_unrepeatable("fuzz", id & 1 != 0);
            }
            _ => {
                let header = Header { tag, ..Header::new(Tag::Words, id.into(), payload.len()) };
                bytes.extend_from_slice(bytemuck::bytes_of(&header));
                bytes.extend_from_slice(payload);
                crate::client::fuzz::lists(payload);
            }
        }
        let mut rest = &bytes[..];
        let mut state = lock(&link.state);
        while let Ok(Some((header, payload))) = wire::split(rest) {
            rest = &rest[HEADER + payload.len()..];
            // What makes no sense ends the connection.
            let Ok(()) = link.dispatch(&mut state, &header, payload) else {
                inspect(&state);
                return;
            };
        }
        inspect(&state);
    }
    let mut state = lock(&link.state);
    for id in 1..state.next_wait {
        if let Some(Err(Failure::Error(error))) = state.answer_or_abandon(id) {
            assert!(!error.to_string().is_empty());
        }
    }
    // A claim that nobody took goes back.
    assert!(state.waits.values().all(|wait| !wait.is_claim()));
    let forfeits = state.done_waits.iter().filter(|done| matches!(done, Done::Forfeit(_))).count();
    assert!(forfeits <= 2, "more was given back than asked for");
}
