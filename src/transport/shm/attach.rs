//! Asking a server for its memory.

use super::map::Window;
use crate::server::{address_of, boot_id, named_socket, random};
use crate::transport::connect::plain;
use crate::transport::tcp::Link;
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
        return Err("the server does not offer it".to_owned());
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
    let files = fetch(&record)?;
    Window::open(&files, &record, welcome.capacity, welcome.incarnation)
}

/// Shows the token and takes what comes for it.
fn fetch(record: &ShmRecord) -> Result<Vec<OwnedFd>, String> {
    let broke = |e: io::Error| format!("a Unix socket: {}", plain(&e));
    let socket = named_socket(&random()?).map_err(broke)?;
    let server = address_of(&record.name).map_err(broke)?;
    let until = Instant::now() + PATIENCE;
    loop {
        match sendto(&socket, &record.token, SendFlags::NOSIGNAL, &server) {
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
        if got == 16 && bytes[..16] == record.echo {
            return Ok(files);
        }
    }
}
