//! Clients that have yet to prove themselves: how many there may be, and who has to
//! go when there are more.

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, Ipv6Addr};
use std::time::Instant;

/// A host may have one of so many places.
const SHARE: usize = 2;
/// And this many in any case.
const FEW: usize = 8;

/// One of them, as the worker finds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stranger {
    /// Until when it has time.
    pub until: Instant,
    /// Its place in the table of clients.
    pub key: usize,
    /// Which one there.
    pub serial: u32,
}

/// Those of a worker, the oldest first. One that has proved itself stays until its
/// time is over, and is not looked at.
#[derive(Debug)]
pub struct Strangers {
    queue: VecDeque<(Stranger, Option<IpAddr>)>,
    by_host: HashMap<IpAddr, usize>,
    most: usize,
}

/// What counts as one host: of IPv6, the 64 bits that a network gives to it.
fn host(addr: IpAddr) -> IpAddr {
    match addr.to_canonical() {
        IpAddr::V6(v6) => {
            let network = u128::from(v6) & !u128::from(u64::MAX);
            IpAddr::V6(Ipv6Addr::from(network))
        }
        v4 => v4,
    }
}

impl Strangers {
    /// Room for so many.
    pub fn new(most: usize) -> Strangers {
        Strangers { queue: VecDeque::new(), by_host: HashMap::new(), most }
    }

    /// One more. If that is one too many, the one that has to go: the oldest of the
    /// same host if this has more than its share, so that one host cannot keep the
    /// others out; else the oldest of all.
    pub fn push(&mut self, stranger: Stranger, addr: Option<IpAddr>) -> Option<Stranger> {
        let host = addr.map(host);
        self.queue.push_back((stranger, host));
        let of_host = host.map_or(0, |host| {
            let count = self.by_host.entry(host).or_default();
            *count += 1;
            *count
        });
        if of_host > (self.most / SHARE).max(FEW.min(self.most)) {
            let at = self.queue.iter().position(|(_, other)| *other == host)?;
            let gone = self.queue.remove(at)?;
            return Some(self.left(gone));
        }
        if self.queue.len() > self.most {
            return self.pop();
        }
        None
    }

    /// One whose time is over.
    pub fn overdue(&mut self, now: Instant) -> Option<Stranger> {
        self.queue.front().filter(|(stranger, _)| stranger.until <= now)?;
        self.pop()
    }

    fn pop(&mut self) -> Option<Stranger> {
        let gone = self.queue.pop_front()?;
        Some(self.left(gone))
    }

    fn left(&mut self, (stranger, host): (Stranger, Option<IpAddr>)) -> Stranger {
        if let Some(host) = host
            && let Some(count) = self.by_host.get_mut(&host)
        {
            *count -= 1;
            if *count == 0 {
                self.by_host.remove(&host);
            }
        }
        stranger
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_host_that_floods_loses_its_own() {
        let now = Instant::now();
        let mut strangers = Strangers::new(100);
        let stranger = |key| Stranger { until: now + Duration::from_secs(5), key, serial: 0 };
        let [bad, good] = ["10.0.0.1", "10.0.0.2"].map(|a| a.parse::<IpAddr>().unwrap());
        assert_eq!(strangers.push(stranger(0), Some(good)), None);
        for key in 1..1000 {
            let gone = strangers.push(stranger(key), Some(bad));
            assert_eq!(gone.map(|s| s.key), key.checked_sub(50).filter(|&k| k > 0));
        }
        // Many hosts together: the oldest goes.
        let mut gone = Vec::new();
        for i in 0..50u8 {
            let addr = IpAddr::from([10, 1, 0, i]);
            gone.extend(strangers.push(stranger(2000 + usize::from(i)), Some(addr)));
        }
        assert_eq!(gone.iter().map(|s| s.key).collect::<Vec<_>>(), [0]);
        assert_eq!(strangers.overdue(now), None);
        let mut over = 0;
        while strangers.overdue(now + Duration::from_secs(6)).is_some() {
            over += 1;
        }
        assert_eq!(over, 100);
        assert!(strangers.by_host.is_empty());
    }

    #[test]
    fn addresses_of_one_network_are_one_host() {
        let host = |text: &str| super::host(text.parse().unwrap());
        assert_eq!(host("2001:db8:1:2::1"), host("2001:db8:1:2:ffff::2"));
        assert_ne!(host("2001:db8:1:2::1"), host("2001:db8:1:3::1"));
        assert_eq!(host("::ffff:10.0.0.1"), host("10.0.0.1"));
        assert_ne!(host("10.0.0.1"), host("10.0.0.2"));
    }
}
