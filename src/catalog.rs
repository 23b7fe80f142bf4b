//! Names, kinds and shapes of the arrays, and which cells are theirs. Pure.

mod restore;

pub use restore::Placed;

use crate::layout::{CELLS_PER_LINE, Shape};
use crate::segment::Payload;
use crate::slot::MAX_BYTES;
use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

/// Longest name of an array, in bytes.
pub const MAX_NAME: usize = 128;

/// Most arrays that one server keeps.
pub const MAX_ARRAYS: usize = 1 << 16;

/// What the cells of an array are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Kind {
    /// Set, clear, take, wait.
    Event = 1,
    /// Signed 63-bit numbers with atomic arithmetic.
    Counter = 2,
    /// Held by one session at a time.
    Lock = 3,
    /// As many wait as it has parties, then all go on. The parameter is the
    /// number of parties.
    Barrier = 4,
    /// So many permits at most. The parameter is how many there are at first,
    /// and, in its upper half, how many there can be.
    Semaphore = 5,
    /// Version words of messages, which have memory of their own.
    Slots = 6,
}

impl Kind {
    /// Every kind, in the order of its code.
    pub const ALL: [Kind; 6] =
        [Kind::Event, Kind::Counter, Kind::Lock, Kind::Barrier, Kind::Semaphore, Kind::Slots];

    /// The kind with this wire code.
    #[must_use]
    pub const fn from_code(code: u8) -> Option<Kind> {
        match code {
            1 => Some(Kind::Event),
            2 => Some(Kind::Counter),
            3 => Some(Kind::Lock),
            4 => Some(Kind::Barrier),
            5 => Some(Kind::Semaphore),
            6 => Some(Kind::Slots),
            _ => None,
        }
    }

    /// The word that the cells of a new array hold, or `None` if no array of
    /// this kind can have this parameter.
    #[must_use]
    pub const fn first_word(self, param: u64) -> Option<u64> {
        match (self, param) {
            (Kind::Event | Kind::Counter | Kind::Lock, 0) => Some(0),
            (Kind::Barrier, 1..=0xffff_ffff) => Some(0),
            (Kind::Semaphore, _) => {
                let (initial, bound) = crate::cell::sync::permits(param);
                let fits = bound >= 1 && bound <= crate::cell::sync::MAX_PERMITS;
                if fits && initial <= bound { Some(initial << 1) } else { None }
            }
            (Kind::Slots, 1..=MAX_BYTES) => Some(0),
            _ => None,
        }
    }

    /// "event", "counter", and so on.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Kind::Event => "event",
            Kind::Counter => "counter",
            Kind::Lock => "lock",
            Kind::Barrier => "barrier",
            Kind::Semaphore => "semaphore",
            Kind::Slots => "slots",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for Kind {
    type Err = String;
    fn from_str(s: &str) -> Result<Kind, String> {
        match s {
            "event" => Ok(Kind::Event),
            "counter" => Ok(Kind::Counter),
            "lock" => Ok(Kind::Lock),
            "barrier" => Ok(Kind::Barrier),
            "semaphore" => Ok(Kind::Semaphore),
            "slots" => Ok(Kind::Slots),
            other => Err(format!(
                "{other:?} is no kind of array; use event, counter, lock, barrier or semaphore"
            )),
        }
    }
}

/// All that two arrays of one name are compared by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Form {
    /// What the cells are.
    pub kind: Kind,
    /// How many there are.
    pub shape: Shape,
    /// What else belongs to the kind: of a barrier the number of its parties, of
    /// a semaphore the permits at first and, in the upper half, the most that
    /// there can be, of slots the most bytes of a message. 0 for the others.
    pub param: u64,
}

impl fmt::Display for Form {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.kind, self.shape)?;
        match self.kind {
            Kind::Slots => write!(f, " of {} bytes", self.param),
            Kind::Barrier => write!(f, " for {} parties", self.param),
            Kind::Semaphore => {
                let (initial, bound) = crate::cell::sync::permits(self.param);
                write!(f, " with {initial} of {bound} permits")
            }
            Kind::Event | Kind::Counter | Kind::Lock => Ok(()),
        }
    }
}

/// Why a name cannot be the name of an array.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// No characters at all.
    #[error("a name needs at least one character")]
    Empty,
    /// More than 128 bytes.
    #[error("the name has {0} bytes; at most {MAX_NAME} are allowed")]
    TooLong(usize),
    /// A character outside the allowed set.
    #[error("the name has {0:?} at byte {1}; allowed are letters, digits and _ - . / + @")]
    BadCharacter(char, usize),
    /// The first character is punctuation.
    #[error("the name starts with {0:?}; it must start with a letter, a digit or _")]
    BadStart(char),
}

/// Checks the name of an array: 1 to 128 ASCII letters, digits and `_-./+@`,
/// the first one a letter, a digit or `_`.
///
/// # Errors
/// What is wrong with it, and where.
pub fn check_name(name: &str) -> Result<(), NameError> {
    if name.len() > MAX_NAME {
        return Err(NameError::TooLong(name.len()));
    }
    if let Some((at, c)) =
        name.char_indices().find(|&(_, c)| !(c.is_ascii_alphanumeric() || "_-./+@".contains(c)))
    {
        return Err(NameError::BadCharacter(c, at));
    }
    match name.chars().next() {
        None => Err(NameError::Empty),
        Some(c) if c.is_ascii_alphanumeric() || c == '_' => Ok(()),
        Some(c) => Err(NameError::BadStart(c)),
    }
}

/// One array: what it is and which cells it has.
#[derive(Debug)]
pub struct Entry {
    /// Its name.
    pub name: String,
    /// Its kind and shape.
    pub form: Form,
    /// Its first cell in the segment.
    pub base: u32,
    /// How many cells it takes up, padding included.
    pub extent: u32,
    /// Of slots: the messages.
    pub payload: OnceLock<Arc<Payload>>,
    alive: AtomicBool,
    /// Clones of it are with those who reach the cells without asking.
    holders: Arc<()>,
}

impl Entry {
    /// Keeps the cells from being given to another array, also when this one is
    /// removed, as long as the answer lives.
    #[must_use]
    pub fn hold(&self) -> Arc<()> {
        self.holders.clone()
    }

    /// Whether the array has not been removed.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        // Relaxed: read under the catalog's read lock, written under its
        // write lock; the lock orders the two.
        self.alive.load(Ordering::Relaxed)
    }
}

/// Why the catalog refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CatalogError {
    /// The name is not one.
    #[error(transparent)]
    Name(#[from] NameError),
    /// Rows or columns are 0.
    #[error("a shape of {0} has no cells")]
    Empty(Shape),
    /// No array of this kind has this parameter, or not with this shape.
    #[error("the parameter {0} is none for an array of this kind and shape")]
    Param(u64),
    /// The array exists with another kind or shape.
    #[error("exists as {0}")]
    Mismatch(Form),
    /// No array has that name.
    #[error("no such array")]
    Missing,
    /// Not enough cells in one piece.
    #[error("{asked} cells asked for, {free} free, at most {largest} in one piece")]
    Full {
        /// Cells that the array would take up, padding included.
        asked: u64,
        /// Cells that are free.
        free: u64,
        /// Cells in the largest free piece.
        largest: u64,
    },
    /// [`MAX_ARRAYS`] exist already.
    #[error("the server has {MAX_ARRAYS} arrays already")]
    TooMany,
    /// The server could not note the change where it outlives it; the number
    /// is that of the system's error (errno).
    #[error("the server cannot note it in its state: {}", io::Error::from_raw_os_error(*.0))]
    Unkept(i32),
    /// Not enough memory for messages.
    #[error("{asked} bytes of slots asked for, {free} free")]
    SlotsFull {
        /// Bytes that the slots would take up.
        asked: u64,
        /// Bytes that are free.
        free: u64,
    },
    /// The system gives no memory for messages.
    #[error("the system has no {asked} bytes for slots (error {errno})")]
    NoMemory {
        /// Bytes that the slots would take up.
        asked: u64,
        /// The system's number for why.
        errno: u32,
    },
}

/// Every array of a server, and the free cells between them.
#[derive(Debug)]
pub struct Catalog {
    arrays: BTreeMap<String, Arc<Entry>>,
    /// Free pieces, by their first cell: no two touch.
    free: BTreeMap<u32, u32>,
    /// Removed arrays whose cells some client may still reach by itself.
    held: Vec<Arc<Entry>>,
    /// The same from a former life of the server: places and lengths.
    quarantined: Vec<(u32, u32)>,
    capacity: u32,
}

impl Catalog {
    /// A catalog with no arrays over `capacity` cells.
    #[must_use]
    pub fn new(capacity: u32) -> Catalog {
        let whole = capacity - capacity % CELLS_PER_LINE;
        Catalog {
            arrays: BTreeMap::new(),
            held: Vec::new(),
            quarantined: Vec::new(),
            free: (whole > 0).then_some((0, whole)).into_iter().collect(),
            capacity,
        }
    }

    /// Cells of the segment.
    #[must_use]
    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    /// Cells that no array has, and the size of the largest piece of them.
    #[must_use]
    pub fn free_cells(&self) -> (u64, u64) {
        let sum = self.free.values().map(|&n| u64::from(n)).sum();
        let largest = self.free.values().max().copied().unwrap_or(0);
        (sum, u64::from(largest))
    }

    /// How many arrays there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.arrays.len()
    }

    /// The array of this name.
    ///
    /// # Errors
    /// The name is none, or no array has it.
    pub fn get(&self, name: &str) -> Result<Arc<Entry>, CatalogError> {
        check_name(name)?;
        self.arrays.get(name).cloned().ok_or(CatalogError::Missing)
    }

    /// Opens the array of this name, or makes it. The flag says that it is new.
    /// `payload` makes the memory of a new one's messages, if it has any.
    ///
    /// # Errors
    /// Bad name, empty shape, another kind or shape, not enough cells, and
    /// those of `payload`.
    pub fn open_or_create(
        &mut self,
        name: &str,
        form: Form,
        payload: impl FnOnce() -> Result<Option<Arc<Payload>>, CatalogError>,
    ) -> Result<(Arc<Entry>, bool), CatalogError> {
        check_name(name)?;
        if form.shape.cells() == 0 {
            return Err(CatalogError::Empty(form.shape));
        }
        // A slot has one version word.
        let many = form.kind == Kind::Slots && form.shape.cols != 1;
        if form.kind.first_word(form.param).is_none() || many {
            return Err(CatalogError::Param(form.param));
        }
        if let Some(entry) = self.arrays.get(name) {
            if entry.form != form {
                return Err(CatalogError::Mismatch(entry.form));
            }
            return Ok((entry.clone(), false));
        }
        self.release_held();
        if self.arrays.len() >= MAX_ARRAYS {
            return Err(CatalogError::TooMany);
        }
        let (base, extent) = self.allocate(form.shape.extent())?;
        let payload = payload().inspect_err(|_| self.release(base, extent))?;
        let payload = payload.map(OnceLock::from).unwrap_or_default();
        let entry = Arc::new(Entry {
            name: name.to_owned(),
            form,
            base,
            extent,
            payload,
            alive: AtomicBool::new(true),
            holders: Arc::default(),
        });
        self.arrays.insert(name.to_owned(), entry.clone());
        Ok((entry, true))
    }

    /// Removes an array and gives its cells back. Whoever still holds the
    /// entry sees that it is no longer alive. With `hold` the cells come back
    /// only when nobody [holds](Entry::hold) them any more: those who do may
    /// change them without asking.
    ///
    /// # Errors
    /// The name is none, or no array has it.
    pub fn remove(&mut self, name: &str, hold: bool) -> Result<Arc<Entry>, CatalogError> {
        check_name(name)?;
        let entry = self.arrays.remove(name).ok_or(CatalogError::Missing)?;
        // Relaxed: see `Entry::is_alive`.
        entry.alive.store(false, Ordering::Relaxed);
        if hold {
            self.held.push(entry.clone());
        } else {
            self.release(entry.base, entry.extent);
        }
        Ok(entry)
    }

    /// Gives back the cells of removed arrays that nobody holds any more.
    pub fn release_held(&mut self) {
        let (free, held) = std::mem::take(&mut self.held)
            .into_iter()
            .partition(|e| Arc::strong_count(&e.holders) == 1);
        self.held = held;
        for entry in <Vec<Arc<Entry>>>::into_iter(free) {
            self.release(entry.base, entry.extent);
        }
    }

    /// The arrays of slots.
    pub fn slots(&self) -> impl Iterator<Item = &Arc<Entry>> {
        self.arrays.values().filter(|entry| entry.form.kind == Kind::Slots)
    }

    /// Up to `most` arrays whose names come after `after`, in order of name.
    pub fn list(&self, after: &str, most: usize) -> impl Iterator<Item = &Arc<Entry>> {
        use std::ops::Bound::{Excluded, Unbounded};
        self.arrays.range::<str, _>((Excluded(after), Unbounded)).map(|(_, entry)| entry).take(most)
    }

    fn allocate(&mut self, asked: u64) -> Result<(u32, u32), CatalogError> {
        let fit = u32::try_from(asked)
            .ok()
            .and_then(|n| Some((n, self.free.iter().find(|&(_, &len)| len >= n)?)));
        let Some((n, (&base, &len))) = fit else {
            let (free, largest) = self.free_cells();
            return Err(CatalogError::Full { asked, free, largest });
        };
        self.free.remove(&base);
        if len > n {
            self.free.insert(base + n, len - n);
        }
        Ok((base, n))
    }

    fn release(&mut self, mut base: u32, mut len: u32) {
        if let Some((&before, &n)) = self.free.range(..base).next_back()
            && before + n == base
        {
            self.free.remove(&before);
            base = before;
            len += n;
        }
        if let Some(n) = self.free.remove(&(base + len)) {
            len += n;
        }
        self.free.insert(base, len);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn form(rows: u32, cols: u32) -> Form {
        Form { kind: Kind::Event, shape: Shape { rows, cols }, param: 0 }
    }

    #[test]
    fn names() {
        for good in ["a", "read_events", "run-7/params.v2", "_x", "0+1@n"] {
            assert_eq!(check_name(good), Ok(()), "{good}");
        }
        assert_eq!(check_name(""), Err(NameError::Empty));
        assert_eq!(check_name("a b"), Err(NameError::BadCharacter(' ', 1)));
        assert_eq!(check_name("é"), Err(NameError::BadCharacter('é', 0)));
        assert_eq!(check_name("a\0"), Err(NameError::BadCharacter('\0', 1)));
        assert_eq!(check_name("-a"), Err(NameError::BadStart('-')));
        assert_eq!(check_name(&"x".repeat(129)), Err(NameError::TooLong(129)));
    }

    #[test]
    fn another_form_is_refused_and_named() {
        let mut c = Catalog::new(1024);
        c.open_or_create("a", form(4, 4), || Ok(None)).unwrap();
        assert!(!c.open_or_create("a", form(4, 4), || Ok(None)).unwrap().1);
        assert_eq!(
            c.open_or_create("a", form(4, 5), || Ok(None)).unwrap_err(),
            CatalogError::Mismatch(form(4, 4))
        );
        assert_eq!(
            c.open_or_create("b", form(0, 5), || Ok(None)).unwrap_err(),
            CatalogError::Empty(Shape { rows: 0, cols: 5 })
        );
    }

    #[test]
    fn a_full_segment_says_how_full() {
        let mut c = Catalog::new(64);
        c.open_or_create("a", form(1, 40), || Ok(None)).unwrap();
        assert_eq!(
            c.open_or_create("b", form(2, 12), || Ok(None)).unwrap_err(),
            CatalogError::Full { asked: 48, free: 24, largest: 24 }
        );
        assert!(matches!(
            c.open_or_create("c", form(1 << 20, 1 << 20), || Ok(None)).unwrap_err(),
            CatalogError::Full { asked, .. } if asked > 1 << 40
        ));
    }

    #[test]
    fn held_cells_come_back_when_nobody_holds_them() {
        let mut c = Catalog::new(64);
        let (entry, _) = c.open_or_create("a", form(1, 64), || Ok(None)).unwrap();
        let holder = entry.hold();
        drop(c.remove("a", true).unwrap());
        assert!(!entry.is_alive());
        assert!(matches!(
            c.open_or_create("b", form(1, 8), || Ok(None)),
            Err(CatalogError::Full { free: 0, .. })
        ));
        drop(holder);
        c.open_or_create("b", form(1, 64), || Ok(None)).unwrap();
    }

    proptest! {
        #[test]
        fn cells_belong_to_one_array(ops in prop::collection::vec((0u8..12, 1u32..6, 1u32..20, any::<bool>()), 1..200)) {
            let mut c = Catalog::new(600);
            for (n, rows, cols, open) in ops {
                let name = format!("a{n}");
                if open { let _ = c.open_or_create(&name, form(rows, cols), || Ok(None)); } else { let _ = c.remove(&name, false); }
                let mut owned = vec![0u8; 600];
                for e in c.list("", usize::MAX) {
                    for cell in &mut owned[e.base as usize..(e.base + e.extent) as usize] { *cell += 1; }
                }
                for (&base, &len) in &c.free {
                    for cell in &mut owned[base as usize..(base + len) as usize] { *cell += 1; }
                }
                prop_assert!(owned.iter().all(|&n| n == 1));
            }
            let names: Vec<String> = c.list("", usize::MAX).map(|e| e.name.clone()).collect();
            for name in names { c.remove(&name, false).unwrap(); }
            prop_assert_eq!(c.free_cells(), (600, 600));
        }
    }
}
