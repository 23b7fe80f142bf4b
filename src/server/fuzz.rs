//! What comes to the socket where memory is handed out.

use super::shm::{Shm, address_of, named_socket, random};
use crate::auth::{Access, Domain};
use crate::fuzz::Input;
use crate::segment::Segment;
use rustix::net::{SendFlags, sendto};
use std::cell::Cell;
use std::sync::Arc;
use std::time::{Duration, Instant};

const SESSION: u64 = 5;

/// Datagrams that are a token, nearly one, one that was used, or anything else.
pub(crate) fn tokens(input: &mut Input<'_>) {
    if input.is_empty() {
        return;
    }
    let Ok(segment) = Segment::published(64) else {
        return;
    };
    let (Ok(shm), Ok(name)) = (Shm::open(Arc::new(segment), 64, Domain::Cpu, 1), random()) else {
        return;
    };
    let Ok(socket) = named_socket(&name) else {
        return;
    };
    let now = Instant::now();
    let Ok(record) = shm.grant(SESSION, Access::ReadWrite, now) else {
        return;
    };
    let Ok(address) = address_of(&record.name) else {
        return;
    };
    let whole = *record.token.expose();
    let mut good = true;
    while !input.is_empty() {
        let [what, at, by] = input.array();
        let mut bytes = match what & 3 {
            0 => input.piece().to_vec(),
            _ => whole.to_vec(),
        };
        if what & 2 != 0
            && let Some(byte) = bytes.get_mut(usize::from(at))
        {
            *byte ^= by;
        }
        bytes.truncate(100);
        let _ = sendto(&socket, &bytes, SendFlags::NOSIGNAL | SendFlags::DONTWAIT, &address);
        let late = what & 4 != 0;
        let then = if late { now + Duration::from_secs(6) } else { now };
        let lives = what & 8 == 0;
        let given = Cell::new(false);
        shm.hand_out(then, |_| lives, |_| given.set(true));
        let is_token = bytes == whole;
        assert_eq!(given.get(), good && is_token && lives && !late);
        // Good once, whatever became of it, and until one half of it was guessed.
        let guessed = bytes.len() == whole.len() && bytes[..8] == whole[..8];
        good &= !guessed;
    }
}
