//! Asking a server for its memory.

use super::map::{Map, Window, check};
use crate::auth::Secret;
use crate::server::{address_of, boot_id, named_socket, random};
use crate::transport::connect::plain;
use crate::transport::fell;
use crate::transport::tcp::Link;
use crate::wire::slots::{ShmSlotsAnswer, SlotsRecord};
use crate::wire::{self, ShmRecord, Tag};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, recvmsg, sendto,
};
use std::io::{self, IoSliceMut};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

/// How long the server may take for each of its two answers.
const PATIENCE: Duration = Duration::from_secs(2);

/// Asks for the memory of the server that the session is with, and maps it.
/// Blocks for a few seconds at most.
///
/// # Errors
/// Why it cannot be had, in words.
pub(super) fn attach(link: &Link) -> Result<Window, String> {
    let welcome = link.welcome();
    if !welcome.offers_shm {
        return Err(not_offered(link));
    }
    if let Some((here, there)) = link.ends()
        && here != there
    {
        return Err(format!(
            "the server is on another machine, or in another network namespace ({there}; this one is {here})"
        ));
    }
    let boot = boot_id()?;
    let answer = link
        .ask_later(Tag::ShmOpen, &[], PATIENCE)
        .map_err(|_| "the connection to the server broke".to_owned())?;
    let record = match answer {
        Some((Tag::ShmOpened, bytes)) => {
            let (record, _) = wire::take::<ShmRecord>(Tag::ShmOpened, &bytes)
                .map_err(|_| "the server's offer makes no sense".to_owned())?;
            record
        }
        Some((_, why)) => return Err(String::from_utf8_lossy(&why).into_owned()),
        None => return Err("the server did not answer in time".to_owned()),
    };
    if record.boot != boot {
        return Err("the server is on another machine, or in a virtual one".to_owned());
    }
    let files = fetch(&record.name, &record.token, &record.echo)?;
    Window::open(&files, &record, welcome.capacity, welcome.incarnation)
}

/// Why the server has none, in its own words: it refuses what it does not offer.
fn not_offered(link: &Link) -> String {
    match link.ask_later(Tag::ShmOpen, &[], PATIENCE) {
        Ok(Some((Tag::ShmRefused, why))) => fell::not_offered(&why),
        _ => "the server does not offer it".to_owned(),
    }
}

/// Asks for the memory of an array's messages, and maps it.
///
/// # Errors
/// Why it cannot be had, in words.
pub(super) fn messages(link: &Link, array: u16) -> Result<(Map, bool), String> {
    let record = SlotsRecord { array, ..SlotsRecord::default() };
    let answer = link
        .ask_later(Tag::ShmSlots, bytemuck::bytes_of(&record), PATIENCE)
        .map_err(|_| "the connection to the server broke".to_owned())?;
    let record = match answer {
        Some((Tag::ShmSlotsOpened, bytes)) => {
            let taken = wire::take::<ShmSlotsAnswer>(Tag::ShmSlotsOpened, &bytes);
            taken.map_err(|_| "the server's offer makes no sense".to_owned())?.0
        }
        Some((_, why)) => return Err(String::from_utf8_lossy(&why).into_owned()),
        None => return Err("the server did not answer in time".to_owned()),
    };
    let files = fetch(&record.name, &record.token, &record.echo)?;
    let [file] = &files[..] else {
        return Err(format!("the server sent {} files instead of one", files.len()));
    };
    let writable = record.writable != 0;
    check(file, record.bytes, record.sealed != 0)?;
    let map = Map::new(file, record.bytes, writable);
    Ok((map.map_err(|e| format!("mapping the memory: {e}"))?, writable))
}

/// Shows the token and takes what comes for it.
fn fetch(name: &[u8; 16], token: &Secret<16>, echo: &Secret<16>) -> Result<Vec<OwnedFd>, String> {
    let broke = |e: io::Error| format!("a Unix socket: {}", plain(&e));
    let socket = named_socket(&random()?).map_err(broke)?;
    let server = address_of(name).map_err(broke)?;
    let until = Instant::now() + PATIENCE;
    loop {
        match sendto(&socket, token.expose(), SendFlags::NOSIGNAL, &server) {
            Ok(_) => break,
            Err(Errno::CONNREFUSED) => {
                return Err(
                    "the server is in another network namespace (another container?)".to_owned()
                );
            }
            Err(Errno::INTR) => {}
            // As many datagrams wait there as may.
            Err(Errno::AGAIN) if Instant::now() < until => {
                std::thread::sleep(Duration::from_millis(2));
            }
            Err(e) => return Err(broke(e.into())),
        }
    }
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err("the server did not send its memory in time".to_owned());
        }
        let timeout =
            Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        // Whatever it says, the next read tells.
        let _ = poll(&mut [PollFd::new(&socket, PollFlags::IN)], Some(&timeout));
        let mut bytes = [0; 17];
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let mut parts = [IoSliceMut::new(&mut bytes)];
        let got = match recvmsg(&socket, &mut parts, &mut control, flags) {
            Ok(got) => got.bytes,
            Err(Errno::AGAIN | Errno::INTR) => continue,
            Err(e) => return Err(broke(e.into())),
        };
        let mut files = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(sent) = message {
                files.extend(sent);
            }
        }
        // Our name can be seen by others on this machine. What does not come
        // from the server is closed again.
        let said = bytes.first_chunk::<16>().filter(|_| got == 16);
        if said.is_some_and(|said| Secret::new(*said).is(echo)) {
            return Ok(files);
        }
    }
}
