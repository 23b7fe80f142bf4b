//! One thread a process that notices when a server is gone.
//!
//! A client that works in memory does not read its connection, and would go on
//! in the memory of a server that has died. So this thread sleeps until the
//! other end of a connection closes, which the system does for a server that
//! was killed.

use crate::engine::lock;
use crate::transport::socket::Socket;
use crate::transport::tcp::Link;
use farcell_sys::fork::{self, Generation};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, Weak};

/// A connection, and whose it is.
type Watched = (Arc<Socket>, Weak<Link>);

struct Watch {
    /// Whose thread it is: a forked child has none.
    generation: Generation,
    news: OwnedFd,
    added: Mutex<Vec<Watched>>,
}

static WATCH: Mutex<Option<Arc<Watch>>> = Mutex::new(None);

/// Looks at the link when the other end of this connection closes.
///
/// # Errors
/// The thread cannot be started, or no descriptor is left.
pub(super) fn watch(socket: Arc<Socket>, link: Weak<Link>) -> io::Result<()> {
    let mut current = lock(&WATCH);
    let watch = match &*current {
        Some(watch) if watch.generation == fork::generation() => watch.clone(),
        _ => {
            let watch = Arc::new(Watch {
                generation: fork::generation(),
                news: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
                added: Mutex::default(),
            });
            let its = watch.clone();
            std::thread::Builder::new()
                .name("farcell-watch".to_owned())
                .spawn(move || its.run())?;
            *current = Some(watch.clone());
            watch
        }
    };
    lock(&watch.added).push((socket, link));
    // It can only be full, and then the thread is awake anyway.
    let _ = rustix::io::write(&watch.news, &1u64.to_ne_bytes());
    Ok(())
}

impl Watch {
    fn run(&self) {
        let mut all: Vec<Watched> = Vec::new();
        loop {
            let gone: Vec<bool> = {
                let sockets = all.iter().map(|(socket, _)| PollFd::new(socket, PollFlags::RDHUP));
                let mut fds: Vec<PollFd<'_>> =
                    std::iter::once(PollFd::new(&self.news, PollFlags::IN))
                        .chain(sockets)
                        .collect();
                // Interrupted, it looks in vain.
                let _ = poll(&mut fds, None);
                fds[1..].iter().map(|fd| !fd.revents().is_empty()).collect()
            };
            let mut gone = gone.into_iter();
            all.retain(|(socket, link)| {
                if !gone.next().unwrap_or(false) {
                    return link.strong_count() > 0;
                }
                if let Some(link) = link.upgrade() {
                    link.look(socket);
                }
                false
            });
            let mut count = [0; 8];
            let _ = rustix::io::read(&self.news, &mut count);
            all.append(&mut lock(&self.added));
        }
    }
}
