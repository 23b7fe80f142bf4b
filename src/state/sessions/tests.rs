use super::*;
use crate::state::folder::Folder;
use proptest::prelude::*;
use std::fs;
use std::os::unix::fs::PermissionsExt;

const CELLS: u32 = 64;

fn folder() -> (tempfile::TempDir, Arc<Folder>) {
    let private = fs::Permissions::from_mode(0o700);
    let dir = tempfile::Builder::new().permissions(private).tempdir_in("/dev/shm").unwrap();
    let folder = Arc::new(Folder::open(dir.path(), true).unwrap());
    (dir, folder)
}

fn head(life: u32) -> Head {
    let magic = *b"farcellC";
    Head { magic, version: VERSION, capacity: CELLS, state: 7, life, time: 0 }
}

fn began(seat: u32) -> Note<'static> {
    Note::Began { session: u64::from(seat) + 1000, access: Access::ReadWrite, seat }
}

/// A file that says a bit of everything, and who lives after it.
fn fill(file: &mut SessionsFile) {
    for seat in 1..=4 {
        file.note(&began(seat));
    }
    file.note(&Note::Named { seat: 1, name: "rank 0" });
    file.note(&Note::Named { seat: 2, name: "rank 1" });
    file.note(&Note::Named { seat: 4, name: "rank 3" });
    for place in [3, 9, 20] {
        file.note(&Note::Party { seat: 1, place });
    }
    file.note(&Note::Party { seat: 3, place: 3 });
    file.note(&Note::Ended { seat: 2, how: Gone::Silent });
    file.note(&Note::Released { seat: 3 });
    file.note(&Note::Ended { seat: 4, how: Gone::Released });
    file.note(&Note::Cleared { base: 8, extent: 4 });
}

fn again(folder: &Arc<Folder>, life: u32) -> (Formers, SessionsFile) {
    let bytes = fs::read(folder.file(NAME)).unwrap();
    let sessions = Sessions::read(&bytes, &head(life)).unwrap();
    SessionsFile::make(folder, CELLS, (7, life + 1), sessions).unwrap()
}

#[test]
fn what_is_noted_is_there_in_the_next_life_and_the_one_after() {
    let (_dir, folder) = folder();
    let (none, mut file) = SessionsFile::make(&folder, CELLS, (7, 1), Sessions::default()).unwrap();
    assert_eq!(none, Formers::default());
    fill(&mut file);
    for life in 1..4 {
        let (formers, _) = again(&folder, life);
        let mut seats: Vec<u32> = formers.sessions.keys().copied().collect();
        seats.sort_unstable();
        assert_eq!(seats, [1, 3]);
        let one = &formers.sessions[&1];
        assert_eq!((one.session, one.name.as_deref()), (1001, Some("rank 0")));
        assert_eq!(one.parties, HashSet::from([3, 20]), "the array on 9 is gone");
        assert!(formers.sessions[&3].parties.is_empty(), "it was released");
        assert_eq!(formers.lost, [(Arc::from("rank 1"), Gone::Silent)]);
        assert_eq!(formers.last_seat, 4, "seats are not used again soon");
    }
}

#[test]
fn the_file_stays_short_whoever_comes_and_goes() {
    let (_dir, folder) = folder();
    let (_, mut file) = SessionsFile::make(&folder, CELLS, (7, 1), Sessions::default()).unwrap();
    file.note(&began(1));
    let mut longest = 0;
    for seat in 2..6000 {
        file.note(&began(seat));
        file.note(&Note::Ended { seat, how: Gone::Closed });
        longest = longest.max(fs::metadata(folder.file(NAME)).unwrap().len());
    }
    assert!((60_000..70_000).contains(&longest), "{longest}");
    drop(file);
    let (formers, _) = again(&folder, 1);
    assert_eq!(formers.sessions.len(), 1);
    assert_eq!(formers.last_seat, 5999);
}

#[test]
fn every_flipped_byte_is_noticed_and_so_is_each_cut() {
    let (_dir, folder) = folder();
    let (_, mut file) = SessionsFile::make(&folder, CELLS, (7, 1), Sessions::default()).unwrap();
    fill(&mut file);
    let good = fs::read(folder.file(NAME)).unwrap();
    assert!(Sessions::read(&good, &head(1)).is_ok());
    for at in 0..good.len() {
        let mut bad = good.clone();
        bad[at] ^= 1 << (at % 8);
        assert!(Sessions::read(&bad, &head(1)).is_err(), "byte {at}");
        assert!(Sessions::read(&good[..at], &head(1)).is_err(), "cut at {at}");
    }
    let more = [&good[..], &[1; 50]].concat();
    assert!(Sessions::read(&more, &head(1)).is_ok(), "behind the sealed part is no damage");
    // It may have got its number when the catalog had not yet.
    assert!(Sessions::read(&good, &head(0)).is_ok());
    for strange in [head(2), Head { state: 8, ..head(1) }, Head { capacity: 65, ..head(1) }] {
        assert!(Sessions::read(&good, &strange).is_err(), "{strange:?}");
    }
}

#[test]
fn what_cannot_be_is_refused_also_under_a_right_seal() {
    let none = Record::zeroed();
    let with = |record: Record, body: &[u8]| {
        let mut bytes = Vec::new();
        push(&mut bytes, record, body);
        bytes
    };
    let one = with(Record { tag: BEGAN, code: 1, seat: 1, session: 5, ..none }, &[]);
    let name = |seat| with(Record { tag: NAMED, seat, len: 1, ..none }, b"x");
    let cases = [
        with(Record { tag: 0, ..none }, &[]),
        with(Record { tag: BEGAN, code: 3, seat: 1, session: 5, ..none }, &[]),
        with(Record { tag: BEGAN, code: 1, seat: 0, session: 5, ..none }, &[]),
        with(Record { tag: BEGAN, code: 1, seat: MAX_SEAT + 1, session: 5, ..none }, &[]),
        with(Record { tag: BEGAN, code: 1, seat: 1, session: 0, ..none }, &[]),
        [&one[..], &one].concat(),
        with(Record { tag: ENDED, code: 1, seat: 1, ..none }, &[]),
        [&one[..], &with(Record { tag: ENDED, code: 9, seat: 1, ..none }, &[])].concat(),
        name(1),
        [&one[..], &with(Record { tag: NAMED, seat: 1, ..none }, &[])].concat(),
        [&one[..], &with(Record { tag: NAMED, seat: 1, len: 9, ..none }, &[0xff; 9])].concat(),
        [&one[..], &with(Record { tag: NAMED, seat: 1, len: 129, ..none }, &[b'x'; 129])].concat(),
        [&one[..], &with(Record { tag: PARTY, seat: 1, place: CELLS, ..none }, &[])].concat(),
        [&one[..], &with(Record { tag: WILL, seat: 1, len: 8, ..none }, &[0; 8])].concat(),
        [&one[..], &with(Record { tag: WILL, seat: 1, len: 32, ..none }, &[0; 32])].concat(),
        [&one[..], &one[..20]].concat(),
        with(Record { tag: NAMED, seat: 1, len: u32::MAX, ..none }, &[]),
        [
            &one[..],
            &with(Record { tag: BEGAN, code: 1, seat: 2, session: 6, ..none }, &[]),
            &name(1),
            &name(2),
        ]
        .concat(),
    ];
    let (_dir, folder) = folder();
    for (at, changes) in cases.into_iter().enumerate() {
        let head = Head { magic: SORT.magic, ..head(1) };
        Sealed::draft(&folder, SORT, head, &changes).unwrap().publish().unwrap();
        let bytes = fs::read(folder.file(NAME)).unwrap();
        let error = Sessions::read(&bytes, &head).unwrap_err();
        assert!(matches!(error, Bad::Content(_)), "case {at}: {error}");
    }
}

proptest! {
    #[test]
    fn any_bytes_are_changes_or_an_error(
        bytes in prop::collection::vec(any::<u8>(), 0..200), tag in 0u8..11, len in 0u32..40,
    ) {
        let mut register = Register::default();
        let record = Record { tag, seat: 1, len, ..Record::zeroed() };
        let began = Record { tag: BEGAN, code: 1, seat: 1, session: 1, ..Record::zeroed() };
        let mut all = Vec::new();
        push(&mut all, began, &[]);
        push(&mut all, record, &bytes);
        let mut rest = &all[..];
        while !rest.is_empty() && register.apply(&mut rest).is_ok() {}
        let _ = register.check(CELLS);
    }
}
