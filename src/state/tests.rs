use super::record::VERSION;
use super::*;
use crate::catalog::{Entry, Form, Kind};
use crate::engine::{Engine, Journal, Newcomer, Out};
use crate::layout::{CELLS_AT, HEADER_BYTES, Shape};
use crate::slot::Version;
use crate::wire::{self, Tag};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::path::Path;
use std::time::Duration;
use tempfile::TempDir;

const CELLS: u32 = 256;

/// Everything in a folder, to the byte.
type Files = BTreeMap<PathBuf, Vec<u8>>;

fn memory() -> TempDir {
    tempfile::Builder::new().permissions(private()).tempdir_in("/dev/shm").unwrap()
}

fn private() -> fs::Permissions {
    fs::Permissions::from_mode(0o700)
}

fn form(kind: Kind, rows: u32, cols: u32) -> Form {
    Form { kind, shape: Shape { rows, cols }, param: 0 }
}

fn sources(dir: &Path) -> Sources {
    Sources {
        folder: Some(Arc::new(Folder::open(dir, true).unwrap())),
        restore: None,
        newest: None,
        capacity: None,
        usual: CELLS,
    }
}

fn start(dir: &Path) -> Result<Beginning> {
    begin(sources(dir))
}

/// A life of a server without sockets, whose removed arrays may still be
/// reached if it is `one_sided`.
fn engine(beginning: Beginning, one_sided: bool) -> Engine<Segment> {
    let Beginning { segment, catalog, journal, .. } = beginning;
    let engine = Engine::with_catalog(segment, catalog, Duration::from_secs(1));
    engine.one_sided(one_sided).journal(Box::new(journal.unwrap()))
}

/// Removes an array as a client; whether that was done.
fn remove(engine: &Engine<Segment>, name: &str) -> bool {
    let (access, route) = (crate::auth::Access::ReadWrite, 1);
    let newcomer = Newcomer { access, resume: None, next_request: 1, fresh: 1, route };
    let mut out = Out::default();
    let session = engine.attach(&newcomer, Duration::ZERO, &mut out).session;
    let mut frame = Vec::new();
    wire::push(&mut frame, Tag::Remove, 1, &[name.as_bytes()]);
    let mut session = session.lock().unwrap();
    engine.handle(Duration::ZERO, &mut session, &frame, &mut out).1.unwrap();
    out.reply[4] == Tag::Words as u8
}

/// A state with three arrays, one of them removed, and some values.
fn fill_some(dir: &Path) {
    let engine = engine(start(dir).unwrap(), true);
    let file = fs::File::options().write(true).open(dir.join("segment")).unwrap();
    for (name, kind, cols) in
        [("a", Kind::Event, 8), ("b", Kind::Counter, 9), ("c", Kind::Event, 20)]
    {
        let (entry, _) = engine.open(name, form(kind, 2, cols)).unwrap();
        for cell in 0..entry.extent {
            let word = u64::from(cell) << 1 | 1;
            let at = CELLS_AT as u64 + 8 * u64::from(entry.base + cell);
            file.write_all_at(&word.to_le_bytes(), at).unwrap();
        }
    }
    assert!(remove(&engine, "a"));
}

fn contents(beginning: &Beginning) -> BTreeMap<String, (Form, u32, Vec<u64>)> {
    let words = |e: &Entry| {
        let cells = &beginning.segment.cells()[e.base as usize..(e.base + e.extent) as usize];
        cells.iter().map(|c| c.load(Ordering::Relaxed)).collect()
    };
    let all = beginning.catalog.list("", usize::MAX);
    all.map(|e| (e.name.clone(), (e.form, e.base, words(e)))).collect()
}

fn files(dir: &Path) -> Files {
    let all = fs::read_dir(dir).unwrap().map(|e| e.unwrap().path());
    all.filter(|p| !p.ends_with("lock")).map(|p| (p.clone(), fs::read(p).unwrap())).collect()
}

fn put(files: &Files) {
    for (path, bytes) in files {
        if fs::read(path).ok().as_ref() != Some(bytes) {
            fs::write(path, bytes).unwrap();
        }
    }
}

fn why(result: Result<Beginning>) -> String {
    result.map(|b| b.origin).unwrap_err().to_string()
}

#[test]
fn a_life_goes_on_where_the_last_one_ended() {
    let dir = memory();
    fill_some(dir.path());
    let mut incarnations = Vec::new();
    for life in 2..5 {
        let beginning = start(dir.path()).unwrap();
        assert_eq!(beginning.origin, Origin::State { life });
        incarnations.push(beginning.incarnation);
        let found = contents(&beginning);
        assert_eq!(found.keys().collect::<Vec<_>>(), ["b", "c"]);
        for (_, _, words) in found.values() {
            // The waiting bits are gone, the values are not.
            assert!(words.iter().enumerate().all(|(i, &w)| w == (i as u64) << 1), "{words:?}");
        }
        // The cells of "a" were held.
        assert!(beginning.catalog.has_quarantine());
        let free = beginning.catalog.free_cells().0;
        assert_eq!(free, u64::from(CELLS) - 2 * 8 - 2 * 24 - 2 * 24);
    }
    assert!(incarnations.iter().all(|i| i >> 32 == incarnations[0] >> 32));
    incarnations.dedup();
    assert_eq!(incarnations.len(), 3);
    for file in ["segment", "catalog", "lock"] {
        let mode = fs::metadata(dir.path().join(file)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{file}");
    }
}

#[test]
fn cells_of_removed_arrays_wait_for_a_lease() {
    let dir = memory();
    fill_some(dir.path());
    let engine = engine(start(dir.path()).unwrap(), false);
    let large = form(Kind::Counter, 1, CELLS - 2 * 24 - 2 * 24);
    assert!(engine.open("large", large).is_err());
    let mut out = Out::default();
    engine.expire(Duration::from_millis(900), &mut out);
    assert!(engine.open("large", large).is_err());
    engine.expire(Duration::from_millis(1100), &mut out);
    // They are free again, in the pieces that there are.
    engine.open("small", form(Kind::Event, 1, 16)).unwrap();
}

#[test]
fn a_long_journal_is_written_anew() {
    let dir = memory();
    let engine = engine(start(dir.path()).unwrap(), false);
    engine.open("stays", form(Kind::Event, 1, 1)).unwrap();
    let mut longest = 0;
    for _ in 0..2000 {
        engine.open("comes-and-goes", form(Kind::Counter, 1, 1)).unwrap();
        assert!(remove(&engine, "comes-and-goes"));
        longest = longest.max(fs::metadata(dir.path().join("catalog")).unwrap().len());
    }
    assert!((60_000..70_000).contains(&longest), "{longest}");
    drop(engine);
    let found = contents(&start(dir.path()).unwrap());
    assert_eq!(found.keys().collect::<Vec<_>>(), ["stays"]);
}

#[test]
fn every_flipped_byte_of_a_catalog_is_noticed() {
    let dir = memory();
    fill_some(dir.path());
    let good = files(dir.path());
    let path = dir.path().join("catalog");
    let len = good[&path].len();
    for at in 0..len {
        let mut bad = good.clone();
        bad.get_mut(&path).unwrap()[at] ^= 1 << (at % 8);
        put(&bad);
        let error = why(start(dir.path()));
        assert!(error.contains("catalog: ") && error.contains("nothing was changed"), "{error}");
        assert_eq!(files(dir.path()), bad, "byte {at}: {error}");
    }
    for cut in 0..len {
        let mut bad = good.clone();
        bad.get_mut(&path).unwrap().truncate(cut);
        put(&bad);
        let error = why(start(dir.path()));
        assert_eq!(files(dir.path()), bad, "cut at {cut}: {error}");
    }
    // What a killed server has written behind the sealed part is no damage.
    let mut more = good.clone();
    more.get_mut(&path).unwrap().extend_from_slice(&[1; 50]);
    put(&more);
    assert_eq!(contents(&start(dir.path()).unwrap()).len(), 2);
}

#[test]
fn a_flipped_byte_of_the_header_is_noticed() {
    let dir = memory();
    fill_some(dir.path());
    let good = files(dir.path());
    let path = dir.path().join("segment");
    let whole = contents(&start(dir.path()).unwrap());
    put(&good);
    let mut refused = 0;
    for at in 0..CELLS_AT {
        let mut bad = good.clone();
        bad.get_mut(&path).unwrap()[at] ^= 1 << (at % 8);
        put(&bad);
        match start(dir.path()) {
            Ok(beginning) => {
                assert!(at >= HEADER_BYTES, "byte {at}");
                assert_eq!(contents(&beginning), whole, "byte {at}");
            }
            Err(error) => {
                refused += 1;
                assert!(error.to_string().contains("segment: "), "{error}");
                assert_eq!(files(dir.path()), bad, "byte {at}: {error}");
            }
        }
    }
    assert_eq!(refused, HEADER_BYTES, "the page behind it is for anyone to write to");
    for len in [0, 1, 4095, 4096, good[&path].len() - 1, good[&path].len() + 4096] {
        let mut bad = good.clone();
        bad.get_mut(&path).unwrap().resize(len, 0);
        put(&bad);
        let error = why(start(dir.path()));
        assert!(error.contains("bytes, and not"), "{error}");
        assert_eq!(files(dir.path()), bad, "{len} bytes: {error}");
    }
}

#[test]
fn what_is_no_state_is_refused_and_stays() {
    let cases: [(&str, &[u8], &str); 4] = [
        ("catalog", b"", "is no catalog"),
        ("catalog", b"#!/bin/sh\n", "is no catalog"),
        ("segment", b"", "and no catalog"),
        ("segment", &[0; 8192], "and no catalog"),
    ];
    for (name, content, words) in cases {
        let dir = memory();
        fs::write(dir.path().join(name), content).unwrap();
        fs::set_permissions(dir.path().join(name), fs::Permissions::from_mode(0o600)).unwrap();
        let before = files(dir.path());
        let error = why(start(dir.path()));
        assert!(error.contains(words), "{error}");
        assert_eq!(files(dir.path()), before);
    }
    let dir = memory();
    fill_some(dir.path());
    let path = dir.path().join("catalog");
    let catalog = fs::read(&path).unwrap();
    fs::remove_file(&path).unwrap();
    symlink(dir.path().join("elsewhere"), &path).unwrap();
    assert!(why(start(dir.path())).contains("symbolic link"));
    fs::remove_file(&path).unwrap();
    assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
    assert!(why(start(dir.path())).contains("no regular file"));
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    assert!(why(start(dir.path())).contains("no regular file"));
    fs::remove_dir(&path).unwrap();
    fs::write(&path, &catalog).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
    assert!(why(start(dir.path())).contains("chmod 600"));
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    assert_eq!(contents(&start(dir.path()).unwrap()).len(), 2, "it was whole all the time");
}

#[test]
fn another_version_or_another_state_is_named() {
    let (one, two) = (memory(), memory());
    fill_some(one.path());
    fill_some(two.path());
    let path = one.path().join("catalog");
    let good = fs::read(&path).unwrap();
    let file = fs::File::options().write(true).open(&path).unwrap();
    file.write_all_at(&(VERSION + 1).to_le_bytes(), 8).unwrap();
    let error = why(start(one.path()));
    assert!(
        error.contains("has version 3 of its format, this program reads versions up to 2"),
        "{error}"
    );
    fs::write(&path, &good).unwrap();
    fs::copy(two.path().join("segment"), one.path().join("segment")).unwrap();
    let error = why(start(one.path()));
    assert!(error.contains("does not belong to its catalog"), "{error}");
    let mut asked = sources(two.path());
    asked.capacity = Some(CELLS + 8);
    let error = why(begin(asked));
    assert!(error.contains("has a capacity of 256 cells, and 264 are asked for"), "{error}");
}

#[test]
fn a_first_start_that_was_killed_is_finished() {
    let dir = memory();
    drop(start(dir.path()).unwrap());
    fs::rename(dir.path().join("catalog"), dir.path().join("catalog.new")).unwrap();
    let beginning = start(dir.path()).unwrap();
    assert_eq!(beginning.origin, Origin::State { life: 2 });
    drop(beginning);
    let dir = memory();
    fs::write(dir.path().join("segment.new"), b"half").unwrap();
    fs::write(dir.path().join("catalog.new"), b"half").unwrap();
    assert_eq!(start(dir.path()).unwrap().origin, Origin::Nothing);
}

#[test]
fn folders_where_files_are_made_are_named_and_stay() {
    for name in ["segment.new", "catalog.new", "sessions.new"] {
        let dir = memory();
        drop(start(dir.path()).unwrap());
        if name == "segment.new" {
            fs::remove_file(dir.path().join("segment")).unwrap();
            fs::remove_file(dir.path().join("catalog")).unwrap();
        }
        fs::create_dir(dir.path().join(name)).unwrap();
        let error = why(start(dir.path()));
        assert!(error.contains(name) && error.contains("is a folder"), "{error}");
        assert!(dir.path().join(name).is_dir());
    }
}

#[test]
fn a_change_that_cannot_be_noted_does_not_happen() {
    #[derive(Debug)]
    struct Full;
    impl Journal for Full {
        fn created(&mut self, _: &Entry) -> Result<(), i32> {
            Err(28)
        }
        fn removed(&mut self, _: &Entry, _: bool) -> Result<(), i32> {
            Err(28)
        }
    }
    let segment = Segment::anonymous(CELLS).unwrap();
    let mut catalog = Catalog::new(CELLS);
    catalog.open_or_create("old", form(Kind::Event, 1, 1), || Ok(None)).unwrap();
    let engine = Engine::with_catalog(segment, catalog, Duration::from_secs(1));
    let engine = engine.journal(Box::new(Full));
    let error = engine.open("new", form(Kind::Event, 1, 1)).unwrap_err();
    assert!(error.to_string().contains("No space left"), "{error}");
    assert!(!remove(&engine, "old"));
    let names: Vec<String> = engine.arrays().iter().map(|e| e.name.clone()).collect();
    assert_eq!(names, ["old"]);
}

// ---- snapshots ---------------------------------------------------------------

fn snapshot_of(dir: &Path) -> PathBuf {
    let store = Snapshots::open(&dir.join("snapshots")).unwrap();
    let state = memory();
    fill_some(state.path());
    store.write(&engine(start(state.path()).unwrap(), false), CELLS, 7 << 32 | 1).unwrap().0
}

#[test]
fn a_snapshot_is_taken_up_whole() {
    let dir = tempfile::tempdir().unwrap();
    let path = snapshot_of(dir.path());
    let info = inspect(&path).unwrap();
    assert_eq!(info.bytes, fs::metadata(&path).unwrap().len());
    assert_eq!(info.capacity, CELLS);
    let two = |c| Shape { rows: 2, cols: c };
    assert_eq!(
        info.arrays,
        [("b".to_owned(), Kind::Counter, two(9)), ("c".to_owned(), Kind::Event, two(20))]
    );
    let state = memory();
    let from = |dir: &Path, capacity| {
        let restore = Some(path.clone());
        begin(Sources { restore, capacity, ..sources(dir) })
    };
    let error = why(from(state.path(), Some(64)));
    assert!(error.contains("does not fit into 64 cells"), "{error}");
    let beginning = from(state.path(), Some(CELLS * 2)).unwrap();
    assert_eq!(beginning.origin, Origin::Snapshot(path.clone()));
    let found = contents(&beginning);
    assert_eq!(found.len(), 2);
    for (_, _, words) in found.values() {
        assert!(words.iter().enumerate().all(|(i, &w)| w == (i as u64) << 1), "{words:?}");
    }
    drop(beginning);
    let error = why(from(state.path(), None));
    assert!(error.contains("has a state already"), "{error}");
    assert_eq!(contents(&start(state.path()).unwrap()), found);
}

#[test]
fn every_flipped_byte_of_a_snapshot_is_noticed() {
    let dir = tempfile::tempdir().unwrap();
    let path = snapshot_of(dir.path());
    let good = fs::read(&path).unwrap();
    let try_it = |bytes: &[u8]| {
        fs::write(&path, bytes).unwrap();
        let error = inspect(&path).unwrap_err().to_string();
        assert_eq!(fs::read(&path).unwrap(), bytes, "{error}");
        assert!(error.contains("nothing of it was used"), "{error}");
    };
    for at in 0..good.len() {
        let mut bad = good.clone();
        bad[at] ^= 1 << (at % 8);
        try_it(&bad);
    }
    for cut in 0..good.len() {
        try_it(&good[..cut]);
    }
    try_it(&[&good[..], &[0]].concat());
    fs::write(&path, &good).unwrap();
    inspect(&path).unwrap();
}

#[test]
fn files_of_the_first_version_are_still_read() {
    use sha2::{Digest, Sha256};
    let sealed = |mut bytes: Vec<u8>| {
        let digest = Sha256::digest(&bytes);
        bytes.extend_from_slice(&digest);
        bytes
    };
    let (dir, state) = (tempfile::tempdir().unwrap(), memory());
    let slots = Form { param: 100, ..form(Kind::Slots, 2, 1) };
    let placed = |name: &str, form, base| Placed { name: name.to_owned(), form, base };
    let arrays = [placed("n", form(Kind::Counter, 1, 1), 0), placed("s", slots, 8)];
    // 8 cells of one array and 16 of the other; one message was written.
    let mut bytes = b"farcellS\x01\0\0\0\0\x01\0\0\x05\0\0\0\x01\0\0\0".to_vec();
    bytes.extend_from_slice(&[0; 8]);
    let mut words = [0u64; 24];
    (words[0], words[8]) = (14, Version::whole(3).word());
    words.iter().for_each(|word| bytes.extend_from_slice(&word.to_le_bytes()));
    let table = bytes.len() as u64;
    for (array, place) in arrays.iter().zip([32u64, 32 + 64]) {
        bytes.extend_from_slice(&place.to_le_bytes());
        record::Change::Created(array.clone()).write(&mut bytes);
    }
    bytes.extend_from_slice(b"farcellE");
    [table, 2].iter().for_each(|n| bytes.extend_from_slice(&n.to_le_bytes()));
    let path = dir.path().join("old");
    fs::write(&path, sealed(bytes)).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    let info = inspect(&path).unwrap();
    assert_eq!((info.at_once, info.messages, info.arrays.len()), (false, 0, 2));
    let beginning = begin(Sources { restore: Some(path), ..sources(state.path()) }).unwrap();
    assert!(beginning.kept.is_empty());
    assert_eq!(contents(&beginning)["n"].2[0], 14);
    drop(beginning);
    // A state of that version: what stands beside it is not of its arrays.
    let (head, changes) = (32, 72);
    let path = state.path().join("catalog");
    let mut bytes = fs::read(&path).unwrap();
    bytes[8] = 1;
    let digest = Sha256::new().chain_update(&bytes[..head]).chain_update(&bytes[changes..]);
    bytes[40..72].copy_from_slice(&digest.finalize());
    fs::write(&path, &bytes).unwrap();
    fs::write(state.path().join("slots-8"), "older").unwrap();
    let beginning = start(state.path()).unwrap();
    assert!(beginning.kept.is_empty() && !state.path().join("slots-8").exists());
    assert_eq!(contents(&beginning)["s"].2[0], Version::whole(3).word());
}

#[test]
fn the_last_two_snapshots_stay() {
    let dir = tempfile::tempdir().unwrap();
    let (state, path) = (memory(), dir.path().join("s"));
    let store = Snapshots::open(&path).unwrap();
    assert_eq!(store.newest().unwrap(), None);
    let engine = engine(start(state.path()).unwrap(), false);
    fs::write(path.join("snapshot-7"), "not ours").unwrap();
    for number in 1..5 {
        let (new, at_once) = store.write(&engine, CELLS, 1 << 32).unwrap();
        assert!(at_once);
        assert_eq!(store.newest().unwrap().unwrap(), new);
        assert!(new.ends_with(format!("snapshot-{number:010}")));
    }
    let mut names: Vec<_> = fs::read_dir(&path).unwrap().map(|e| e.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["lock", "snapshot-0000000003", "snapshot-0000000004", "snapshot-7"]);
}

proptest! {
    #[test]
    fn any_bytes_are_a_catalog_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..200), len: u64) {
        let mut front = b"farcellC\x02\0\0\0".to_vec();
        front.resize(32, 0);
        prop_assert!(catalog::read(&bytes).is_err());
        let _ = catalog::read(&[&front[..], &len.to_le_bytes(), &bytes].concat());
    }

    #[test]
    fn any_changes_under_a_good_seal_are_a_catalog_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..200), tag in 0u8..5) {
        use sha2::{Digest, Sha256};
        let mut head = b"farcellC\x01\0\0\0".to_vec();
        head.resize(32, 1);
        let mut changes = bytes;
        if let Some(first) = changes.first_mut() { *first = tag; }
        let digest = Sha256::new().chain_update(&head).chain_update(&changes).finalize();
        let seal = (changes.len() as u64).to_le_bytes();
        match catalog::read(&[&head[..], &seal, &digest[..], &changes].concat()) {
            Ok((_, arrays)) => { let _ = Catalog::restore(CELLS, placed(&arrays), &arrays.held); }
            Err(bad) => prop_assert!(matches!(bad, Bad::Content(_)), "{}", bad),
        }
    }

    #[test]
    fn any_bytes_are_a_snapshot_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..300), ours: bool) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        let mut bytes = bytes;
        if ours { bytes.splice(0..0, *b"farcellS\x01\0\0\0"); }
        fs::write(&path, &bytes).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        prop_assert!(inspect(&path).is_err());
    }
}
