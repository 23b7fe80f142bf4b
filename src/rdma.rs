//! What both ends of an RDMA connection do alike: finding a device, and
//! choosing by which of its addresses to be reached.

use crate::verbs::{
    Connect, Context, DeviceList, Endpoint, Error, Gid, GidEntry, GidKind, LinkLayer, Mtu, Port,
    QueuePair, UnconnectedQueuePair, ack_timeout, library,
};
use crate::wire::{LaneRecord, MAX_LANES, RdmaRecord, Tag, records, take};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

/// How often a request is repeated before its peer counts as dead.
const RETRIES: u8 = 6;

/// Takes `NAME` or `NAME:PORT` apart.
///
/// # Errors
/// What is wrong with it, and what would be right.
pub(crate) fn device_name(text: &str) -> Result<(&str, Option<u8>), String> {
    let wrong = |what: &str| {
        Err(format!("{text:?} names no device: {what}; give NAME or NAME:PORT, such as mlx5_0:1"))
    };
    let (name, port) = match text.split_once(':') {
        Some((name, port)) => (name, Some(port)),
        None => (text, None),
    };
    if name.is_empty() {
        return wrong("there is no name");
    }
    match port.map(str::parse) {
        None => Ok((name, None)),
        Some(Ok(port @ 1..)) => Ok((name, Some(port))),
        Some(_) => wrong("a port is a number from 1 to 255"),
    }
}

/// An open device and the port to use.
#[derive(Debug)]
pub(crate) struct Adapter {
    pub context: Arc<Context>,
    pub port: u8,
    pub state: Port,
}

impl Adapter {
    /// Opens the device that is named `NAME` or `NAME:PORT`, or else the first
    /// one with a port that works.
    pub fn open(named: Option<&str>) -> Result<Adapter, Error> {
        let list = DeviceList::new(library()?)?;
        if let Some(named) = named {
            let (name, port) = device_name(named).map_err(|what| Error::BadName { what })?;
            let context = list.find(name)?.open()?;
            return Adapter::on(&context, port);
        }
        let mut last = None;
        for device in list.iter() {
            match device.open().and_then(|context| Adapter::on(&context, None)) {
                Ok(adapter) => return Ok(adapter),
                Err(error) => last = Some(error),
            }
        }
        Err(last.unwrap_or_else(|| unreachable!("an empty list is an error of its own")))
    }

    /// The port of this number, or else the first one that works.
    fn on(context: &Arc<Context>, port: Option<u8>) -> Result<Adapter, Error> {
        if let Some(port) = port {
            let ports = context.attributes().ports.max(1);
            if port > ports {
                let device = context.name().to_owned();
                return Err(Error::NoSuchPort { device, wanted: port, ports });
            }
            let state = context.active_port(port)?;
            return Ok(Adapter { context: context.clone(), port, state });
        }
        let mut last = None;
        for port in 1..=context.attributes().ports.max(1) {
            match context.active_port(port) {
                Ok(state) => return Ok(Adapter { context: context.clone(), port, state }),
                Err(error) => last = Some(error),
            }
        }
        Err(last.unwrap_or_else(|| unreachable!("there is at least port 1")))
    }

    /// The addresses by which a peer may reach this port, the most likely one
    /// first. `local` is this end of the control connection: the GID that
    /// stands for it leads to where the peer is.
    pub fn addresses(&self, local: Option<IpAddr>) -> Result<Vec<GidEntry>, Error> {
        let mut gids = self.context.gids(self.port)?;
        gids.retain(|entry| entry.netdev_here != Some(false) && !entry.gid.is_zero());
        gids.sort_by_key(|entry| rank(entry, local));
        Ok(gids)
    }

    /// Why [`addresses`](Self::addresses) has none, or not the one of this place
    /// in the port's table.
    pub fn no_address(&self, index: Option<u32>) -> String {
        let place = format!("{} port {}", self.context.name(), self.port);
        let wanted = index.map_or("usable GID".to_owned(), |index| format!("usable GID {index}"));
        let all = self.context.gids(self.port).unwrap_or_default();
        let each = all.iter().map(|entry| {
            let GidEntry { index, gid, netdev, .. } = entry;
            match (entry.netdev_here, netdev) {
                (Some(false), Some(netdev)) => {
                    format!("{index} ({gid}) of {netdev}, which is in another network namespace")
                }
                _ => format!("{index} ({gid})"),
            }
        });
        match each.collect::<Vec<_>>() {
            none if none.is_empty() => format!(
                "{place} has no {wanted}: its table is empty; give its network device an address \
                 (ip addr add)"
            ),
            each => format!("{place} has no {wanted}: there is {}", each.join(", ")),
        }
    }

    /// The address to use with a peer that has this one.
    pub fn address_for(&self, peer: Gid, local: Option<IpAddr>) -> Result<GidEntry, Error> {
        let mut gids = self.addresses(local)?;
        // One of the same family, so that the packets find their way.
        gids.sort_by_key(|entry| {
            (
                entry.gid.ipv4().is_some() != peer.ipv4().is_some(),
                entry.gid.is_link_local() != peer.is_link_local(),
            )
        });
        gids.into_iter().next().ok_or_else(|| Error::NoAddress { what: self.no_address(None) })
    }

    /// Whether peers are reached by their LID alone, without a GID.
    pub fn by_lid(&self) -> bool {
        self.state.link_layer == LinkLayer::InfiniBand
    }

    /// This end, as the peer is told.
    pub fn describe(&self, gid: Gid) -> RdmaRecord {
        let attributes = self.context.attributes();
        RdmaRecord {
            gid: gid.0,
            lid: self.state.lid,
            mtu: self.state.mtu.bytes() as u16,
            initiator_depth: attributes.max_initiator_depth,
            responder_depth: attributes.max_responder_depth,
            ..RdmaRecord::default()
        }
    }

    /// Connects a queue pair to a lane of the peer's, both sides within what
    /// the weaker one can do.
    pub fn connect(
        &self,
        queue: UnconnectedQueuePair,
        gid_index: u32,
        peer: &RdmaRecord,
        lane: &LaneRecord,
        dead_after: Duration,
    ) -> Result<QueuePair, Error> {
        let attributes = self.context.attributes();
        let gid = if self.by_lid() { Gid::default() } else { Gid(peer.gid) };
        let peer_end = Endpoint { queue_pair: lane.queue_pair, psn: lane.psn, lid: peer.lid, gid };
        let mut connect = Connect::to(peer_end, gid_index as u8);
        connect.mtu = Mtu::at_most(self.state.mtu.bytes().min(peer.mtu.into()));
        connect.initiator_depth = attributes.max_initiator_depth.min(peer.responder_depth);
        connect.responder_depth = attributes.max_responder_depth.min(peer.initiator_depth);
        connect.retries = RETRIES;
        connect.ack_timeout = ack_timeout(dead_after, RETRIES);
        queue.connect(&connect)
    }
}

/// The smaller, the more likely.
fn rank(entry: &GidEntry, local: Option<IpAddr>) -> (bool, bool, bool, bool, u32) {
    let ip = entry.gid.ipv4().map_or(IpAddr::V6(entry.gid.ipv6()), IpAddr::V4);
    let family = local.is_some_and(|l| l.is_ipv4() == ip.is_ipv4());
    (
        entry.kind != GidKind::RoceV2,
        entry.gid.is_link_local(),
        local != Some(ip),
        !family,
        entry.index,
    )
}

/// Reads what the peer has.
pub(crate) fn read_offer(tag: Tag, payload: &[u8]) -> Option<(RdmaRecord, Vec<LaneRecord>)> {
    let (record, rest) = take::<RdmaRecord>(tag, payload).ok()?;
    let lanes: Vec<LaneRecord> = records(tag, rest, MAX_LANES).ok()?.collect();
    Some((record, lanes))
}

/// 24 random bits.
pub(crate) fn random_psn() -> u32 {
    getrandom::u32().unwrap_or(0x5a_5a5a) & 0xff_ffff
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_named_with_its_port_or_without() {
        assert_eq!(device_name("rxe0"), Ok(("rxe0", None)));
        assert_eq!(device_name("mlx5_0:2"), Ok(("mlx5_0", Some(2))));
        for wrong in ["", ":1", "rxe0:", "rxe0:0", "rxe0:abc", "rxe0:300", "rxe0:1:1", "rxe0:-1"] {
            let what = device_name(wrong).unwrap_err();
            assert!(what.contains(&format!("{wrong:?}")) && what.contains("NAME:PORT"), "{what}");
        }
    }
}
