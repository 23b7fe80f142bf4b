//! The network: connections that deliver what is sent in order and late, and
//! that break.

use super::random::Random;
use crate::engine::SharedSession;
use std::collections::VecDeque;

/// What goes over a connection.
#[derive(Clone, Debug)]
pub enum Packet {
    /// Who is there, and what it wants to take up again.
    Hello { resume: Option<u64>, next_request: u64 },
    /// Who it is from now on.
    Welcome { session: u64, resumed: bool, seat: u32 },
    /// Bytes of frames, cut anywhere.
    Bytes(Vec<u8>),
    /// The connection is gone.
    End,
}

/// One direction.
#[derive(Debug, Default)]
pub struct Pipe {
    queue: VecDeque<(u64, Packet)>,
    last: u64,
}

impl Pipe {
    pub fn send(&mut self, now: u64, random: &mut Random, packet: Packet) {
        let delay = if random.often(10) { random.below(40) } else { random.below(4) };
        self.last = self.last.max(now + 1 + delay);
        match packet {
            // In two pieces now and then, with anything in between.
            Packet::Bytes(bytes) if bytes.len() > 1 && random.often(20) => {
                let rest = bytes[1 + random.below(bytes.len() as u64 - 1) as usize..].to_vec();
                let front = bytes[..bytes.len() - rest.len()].to_vec();
                self.queue.push_back((self.last, Packet::Bytes(front)));
                self.last += random.below(3);
                self.queue.push_back((self.last, Packet::Bytes(rest)));
            }
            packet => self.queue.push_back((self.last, packet)),
        }
    }

    pub fn receive(&mut self, now: u64) -> Option<Packet> {
        if self.queue.front()?.0 > now {
            return None;
        }
        self.queue.pop_front().map(|(_, packet)| packet)
    }

    /// Nothing comes before this time.
    pub fn hold(&mut self, until: u64) {
        for (at, _) in &mut self.queue {
            *at = (*at).max(until);
        }
        self.last = self.last.max(until);
    }

    /// Some of what is under way is lost, and nothing comes behind it.
    pub fn cut(&mut self, now: u64, random: &mut Random) {
        let keep = random.below(self.queue.len() as u64 + 1) as usize;
        self.queue.truncate(keep);
        self.last = self.queue.back().map_or(now, |(at, _)| *at).max(now);
        let late = random.below(30);
        self.queue.push_back((self.last + late, Packet::End));
    }
}

/// A connection, both directions, and what the server knows of it.
#[derive(Debug, Default)]
pub struct Connection {
    pub client: usize,
    pub up: Pipe,
    pub down: Pipe,
    /// Each end, as long as it has not heard of the other one's.
    pub at_client: bool,
    pub at_server: bool,
    pub session: Option<SharedSession>,
    pub inbox: Vec<u8>,
}
