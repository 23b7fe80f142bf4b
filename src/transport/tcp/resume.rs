//! Bringing a lost connection back.

use super::link::Link;
use crate::auth::{Resume, Welcome};
use crate::error::{Error, Result};
use crate::transport::connect::{connect, plain};
use crate::transport::socket::Socket;
use crate::wire::{self, ErrorRecord, HEADER, Header, OpenRecord, OpenedRecord, Tag};
use std::borrow::Cow;
use std::io::{self, Read, Write};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// First pause between two attempts; it doubles up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// Connects again, until it succeeds or nobody needs the link any more. Runs
/// in a thread of its own.
pub(super) fn reconnect(link: &Weak<Link>) {
    // At once, unless coming back has not helped before.
    let fruitless = link.upgrade().map_or(0, |link| link.fruitless());
    let mut pause = match fruitless {
        0 => Duration::ZERO,
        n => FIRST_PAUSE.saturating_mul(1 << n.min(10)).min(LONGEST_PAUSE),
    };
    loop {
        std::thread::sleep(jitter(pause));
        let Some(link) = link.upgrade() else {
            return;
        };
        let Some(resume) = link.resume_request() else {
            return;
        };
        let attempt = connect(&link.settings.target, resume).and_then(|(socket, welcome)| {
            if welcome.resumed {
                return Ok((socket, welcome, Vec::new()));
            }
            // The session goes on in another life of the server.
            let kept = welcome.session == resume.session;
            let keep = kept.then(|| link.keep_frame()).flatten();
            let opened = open_again(&link, &socket, is_same_state(&resume, &welcome), keep)?;
            Ok((socket, welcome, opened))
        });
        match attempt {
            Ok((socket, welcome, opened)) => {
                link.back(socket, welcome);
                return link.tell_back(&welcome, &opened);
            }
            Err(error) => link.still_down(&error),
        }
        pause = (pause * 2).clamp(FIRST_PAUSE, LONGEST_PAUSE);
    }
}

/// Between half the pause and all of it, so that clients who lost a server
/// together do not come back together.
fn jitter(pause: Duration) -> Duration {
    let random = getrandom::u32().unwrap_or(u32::MAX);
    pause / 2 + (pause / 2).mul_f64(f64::from(random) / f64::from(u32::MAX))
}

/// Whether the server has the arrays that it had before, and those alone.
fn is_same_state(before: &Resume, now: &Welcome) -> bool {
    before.incarnation >> 32 == now.incarnation >> 32
}

/// A new session knows none of our arrays: opens each under its old number,
/// and so creates it on a server that has lost its state. If it has not, an
/// array that is not there was removed, and is not made again. One that cannot
/// be opened stays closed, and operations on it say so. Then the session gets its
/// name and its will, and says what it holds. The answer: number and first cell of
/// each array that was opened.
fn open_again(
    link: &Link,
    socket: &Socket,
    existing: bool,
    keep: Option<Vec<u8>>,
) -> Result<Vec<(u16, u32)>> {
    let mut opened = Vec::new();
    let mut bindings = link.bindings();
    bindings.extend(keep.map(Arc::new));
    let addr = &link.settings.target.addr;
    let broke = |e: io::Error| Error::Unreachable { addr: addr.clone(), why: plain(&e) };
    socket.set_read_timeout(Some(link.settings.target.timeout)).map_err(broke)?;
    let mut stream = socket;
    for frame in &bindings {
        stream.write_all(&for_opening(frame, existing)).map_err(broke)?;
        let mut head = [0; HEADER];
        stream.read_exact(&mut head).map_err(broke)?;
        let header: Header = bytemuck::pod_read_unaligned(&head);
        if header.len as usize > wire::MAX_PAYLOAD {
            let what = wire::Violation::TooLong(header.len).to_string();
            return Err(Error::Protocol { addr: addr.clone(), what });
        }
        let mut payload = Vec::new();
        let read = stream.take(header.len.into()).read_to_end(&mut payload).map_err(broke)?;
        if read < header.len as usize {
            return Err(broke(io::ErrorKind::UnexpectedEof.into()));
        }
        if header.tag == Tag::Opened as u8
            && let Ok((record, _)) = wire::take::<OpenedRecord>(Tag::Opened, &payload)
            && let Ok((asked, _)) = wire::take::<OpenRecord>(Tag::Open, &frame[HEADER..])
        {
            opened.push((asked.array, record.base));
        }
        if header.tag == Tag::Refused as u8
            && let Ok((record, _)) = wire::take::<ErrorRecord>(Tag::Refused, &payload)
        {
            let refusal = wire::Refusal::from_record(&record);
            let what = match frame.get(4) {
                Some(&tag) if tag == Tag::Join as u8 => "the name is not ours any more",
                Some(&tag) if tag == Tag::SetWill as u8 => "the will cannot be left",
                Some(&tag) if tag == Tag::Keep as u8 => "no lock is kept",
                _ => "an array cannot be opened",
            };
            tracing::warn!(target: "farcell::tcp", addr, ?refusal, "{what} on the server that is back");
        }
    }
    socket.set_read_timeout(None).map_err(broke)?;
    Ok(opened)
}

/// Where the tag of a frame is.
const HEAD_TAG: usize = std::mem::offset_of!(Header, tag);

/// The frame that opens an array, or the one that opens it only if it exists.
fn for_opening(frame: &[u8], existing: bool) -> Cow<'_, [u8]> {
    let mut frame = Cow::from(frame);
    if existing && frame[HEAD_TAG] == Tag::Open as u8 {
        frame.to_mut()[HEADER + std::mem::offset_of!(OpenRecord, existing)] = 1;
    }
    frame
}
