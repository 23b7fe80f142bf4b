//! Files of a state folder, and snapshots, with anything in them under a seal
//! that is right.

use super::record::{Head, VERSION};
use super::{catalog, sessions, snapshot};
use crate::auth::Access;
use crate::catalog::{Catalog, Placed};
use crate::engine::{Engine, Newcomer, Out, check_former};
use crate::fuzz::Input;
use crate::segment::Segment;
use rustix::fs::{MemfdFlags, memfd_create};
use sha2::{Digest, Sha256};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Duration;

const CAPACITY: u32 = 512;
const LEASE: Duration = Duration::from_secs(1);

/// A file of changes, its seal as it should be.
fn seal(head: Head, changes: &[u8]) -> Vec<u8> {
    let head = bytemuck::bytes_of(&head);
    let digest = Sha256::new().chain_update(head).chain_update(changes).finalize();
    [head, &(changes.len() as u64).to_le_bytes(), &digest, changes].concat()
}

fn head(magic: [u8; 8], capacity: u32) -> Head {
    Head { magic, version: VERSION, capacity, state: 7, life: 1, time: 0 }
}

/// The catalog and the sessions of a state folder. What can be read can be
/// taken up by a server, and ends with its lease.
pub fn sealed(data: &[u8]) {
    sealed_sessions(data);
}

/// How many sessions were taken up from it, if it is good.
fn sealed_sessions(data: &[u8]) -> Option<usize> {
    // As it is: nobody who does not know the seal gets in.
    let _ = catalog::read(data);
    let mut input = Input(data);
    let [lo, hi] = input.array();
    let arrays = input.bytes(usize::from(u16::from_le_bytes([lo, hi])));
    let catalog_file = seal(head(*b"farcellC", CAPACITY), arrays);
    let Ok((catalog_head, arrays)) = catalog::read(&catalog_file) else {
        return None;
    };
    // As it is written anew.
    let again = seal(catalog_head, &arrays.to_bytes());
    assert_eq!(catalog::read(&again).ok(), Some((catalog_head, arrays.clone())));
    let placed: Vec<Placed> = arrays.arrays.values().cloned().collect();
    let Ok(catalog) = Catalog::restore(CAPACITY, placed, &arrays.held) else {
        return None;
    };
    let _ = sessions::Sessions::read(input.0, &catalog_head);
    let sessions_file = seal(head(*b"farcellP", CAPACITY), input.0);
    let Ok(read) = sessions::Sessions::read(&sessions_file, &catalog_head) else {
        return None;
    };
    let formers = read.formers();
    for former in formers.sessions.values() {
        assert_eq!(check_former(former, CAPACITY), Ok(()));
    }
    let wanted =
        formers.sessions.values().map(|former| (former.session, former.access)).min_by_key(|f| f.0);
    let lived = formers.sessions.len();
    let Ok(segment) = Segment::anonymous(CAPACITY) else {
        return None;
    };
    let engine = Engine::with_catalog(segment, catalog, LEASE).slot_bytes(1 << 14);
    engine.take_over(formers, None);
    assert_eq!(engine.sessions(), lived);
    let mut out = Out::default();
    if let Some((session, access)) = wanted {
        let newcomer =
            Newcomer { access, resume: Some(session), next_request: 1, fresh: 1, route: 1 };
        let taken = engine.take_up(&newcomer, Duration::ZERO, &mut out);
        assert_eq!(taken.map(|attached| attached.id), Some(session));
        let other = match access {
            Access::ReadWrite => Access::ReadOnly,
            Access::ReadOnly => Access::ReadWrite,
        };
        let newcomer = Newcomer { access: other, ..newcomer };
        assert!(engine.take_up(&newcomer, Duration::ZERO, &mut out).is_none(), "another's session");
    }
    engine.expire(LEASE + Duration::from_millis(1), &mut out);
    for over in std::mem::take(&mut out.ended) {
        engine.end_writes(over.id, &mut out);
        engine.settle(over.id, LEASE, &mut out);
    }
    assert_eq!(engine.sessions(), 0, "a session without a lease");
    Some(lived)
}

/// A snapshot. What can be read has all its cells and messages inside of the file.
pub fn snapshot(data: &[u8]) {
    snapshot_messages(data);
}

/// How many bytes of messages were read from it, if it is good.
fn snapshot_messages(data: &[u8]) -> Option<u64> {
    let mut input = Input(data);
    let [raw] = input.array();
    let mut bytes = Vec::new();
    if raw & 1 == 0 {
        let capacity = u32::from_le_bytes(input.array());
        let table_at = u64::from(u16::from_le_bytes(input.array()));
        let arrays = u64::from(input.byte());
        let head =
            Head { version: VERSION - u32::from(raw >> 2 & 1), ..head(snapshot::MAGIC, capacity) };
        bytes.extend_from_slice(bytemuck::bytes_of(&head));
        bytes.extend_from_slice(input.0);
        bytes.extend_from_slice(b"farcellE");
        bytes.extend_from_slice(&table_at.to_le_bytes());
        bytes.extend_from_slice(&arrays.to_le_bytes());
        // A tail of version 1 has no flags.
        if head.version > 1 {
            bytes.extend_from_slice(&u64::from(raw >> 1 & 1).to_le_bytes());
        }
        let digest = Sha256::digest(&bytes);
        bytes.extend_from_slice(&digest);
    } else {
        bytes.extend_from_slice(input.0);
    }
    let Ok(file) = memfd_create("fuzz", MemfdFlags::CLOEXEC) else {
        return None;
    };
    let file = File::from(file);
    // It is read from its beginning on.
    if file.write_all_at(&bytes, 0).is_err() {
        return None;
    }
    let Ok(Ok(read)) = snapshot::check(file) else {
        return None;
    };
    assert!(raw & 1 == 0, "a checksum was guessed");
    let mut words = 0;
    let copied = read.cells(|place, part| {
        words += part.len();
        assert!(u64::from(place) + part.len() as u64 <= u64::from(read.head.capacity));
    });
    assert!(copied.is_ok(), "the cells of an array are not in the file");
    assert!(words * 8 <= bytes.len() * read.arrays.len());
    let mut all = 0;
    for saved in &read.arrays {
        for &at in &saved.messages {
            let mut len = 0;
            let copied = read.message(at, |place, part| {
                assert_eq!(place, len);
                len += part.len() as u64;
            });
            assert!(copied.is_ok(), "a message is not in the file");
            assert!(len == at.len && len <= saved.array.form.param);
            all += len;
        }
    }
    Some(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalog::{Form, Kind};
    use crate::layout::Shape;
    use snapshot::{At, Saved, Writer};

    fn kept(path: &str) -> Vec<u8> {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus");
        std::fs::read(folder.join(path)).unwrap()
    }

    fn placed(name: &str, kind: Kind, rows: u32, base: u32, param: u64) -> Placed {
        let form = Form { kind, shape: Shape { rows, cols: 1 }, param };
        Placed { name: name.to_owned(), form, base }
    }

    /// What the target makes this snapshot from: a counter, and two slots of which
    /// one has a message.
    fn a_snapshot() -> Vec<u8> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("it");
        let mut writer = Writer::begin(File::create(&path).unwrap(), 64, 1).unwrap();
        let message = At { place: writer.place(), len: 11 };
        writer.bytes(b"eleven byte\0\0\0\0\0").unwrap();
        let counter = placed("count", Kind::Counter, 1, 0, 0);
        let slots = placed("slots", Kind::Slots, 2, 8, 64);
        let mut place = |array: &Placed| {
            let place = writer.place();
            writer.cells(&vec![2; array.form.shape.extent() as usize]).unwrap();
            place
        };
        let arrays = [
            Saved { cells: place(&counter), array: counter, messages: Vec::new() },
            Saved { cells: place(&slots), array: slots, messages: vec![message, At::default()] },
        ];
        writer.end(&arrays, true).unwrap();
        let bytes = std::fs::read(path).unwrap();
        let (front, tail) = bytes.split_at(bytes.len() - 64);
        let mut input = vec![0, 64, 0, 0, 0];
        input.extend_from_slice(&tail[8..10]);
        input.push(2);
        input.extend_from_slice(&front[size_of::<Head>()..]);
        input
    }

    #[test]
    fn what_is_kept_to_begin_with_is_good_and_reaches_the_messages() {
        let input = a_snapshot();
        assert_eq!(snapshot_messages(&input), Some(11));
        assert_eq!(kept("snapshot/whole"), input, "fuzz/corpus/snapshot/whole is to be renewed");
        // What was written before there were messages.
        assert_eq!(snapshot_messages(&kept("snapshot/first-version")), Some(0));
        assert_eq!(sealed_sessions(&kept("sealed/whole")), Some(2));
    }
}
