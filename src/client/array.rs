//! What every handle has: an array, and which cell of it.

use super::Client;
use super::options::WaitOptions;
use super::select::{Cell, Woken};
use crate::catalog::Form;
use crate::cell::{Comparison, Condition, Op, event_is_set, value};
use crate::error::{Error, Result};
use crate::layout::Run;
use crate::transport::shm::{Fast, Place, Slot};
use crate::transport::tcp::{self, Patience, Pending};
use crate::transport::{CellOp, Failure, Transport, Waited};
use crate::wire::{self, Refusal, WaitRecord};
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

/// Looks of one who was told to spin before it begins a wait in earnest.
const SPINS: u32 = 512;

/// An array that the session has open. The one place where row and column
/// become the place of a cell.
#[derive(Debug)]
pub(super) struct Array {
    pub client: Client,
    pub name: String,
    pub form: Form,
    pub number: u16,
    /// Of barriers: those that the session has said to be a party of, and which
    /// session that was.
    pub parties: Mutex<HashMap<u32, u64>>,
    /// The way to the cells in memory, if they are there.
    pub slot: &'static Slot,
}

impl Drop for Array {
    fn drop(&mut self) {
        // First, since the number can mean another array behind the second.
        if let Some(shm) = &self.client.core.shm {
            shm.unbind(self.number, self.slot);
        }
        self.client.core.link.drop_binding(self.number);
    }
}

impl Array {
    pub fn rows(&self) -> usize {
        self.form.shape.rows as usize
    }

    pub fn cols(&self) -> usize {
        self.form.shape.cols as usize
    }

    /// The way to the cells.
    pub fn transport(&self) -> &dyn Transport {
        &*self.client.core.transport
    }

    /// Where a cell is, counted from the start of the array. Arithmetic only.
    pub fn offset(&self, row: usize, col: usize) -> Result<u32> {
        let place = match (u32::try_from(row), u32::try_from(col)) {
            (Ok(r), Ok(c)) => self.form.shape.offset(r, c),
            _ => None,
        };
        place.ok_or_else(|| Error::OutOfRange {
            name: self.name.clone(),
            row,
            col,
            rows: self.rows(),
            cols: self.cols(),
        })
    }

    /// One operation on one cell; the word before it.
    pub fn execute(&self, op: Op, offset: u32, a: i64, b: i64) -> Result<u64> {
        let done = self.attempt(op, offset, a as u64, b as u64);
        done.map_err(|f| self.explain(f, op.name()))
    }

    /// The same, and if it fails why, before names are put to the numbers.
    pub fn attempt(&self, op: Op, offset: u32, a: u64, b: u64) -> Result<u64, Failure> {
        match Place::new(self.slot, offset).execute(op, a, b) {
            Fast::Done(word) => Ok(word),
            fast => self.go_on(fast, CellOp { op, array: self.number, offset, a, b }),
        }
    }

    /// The same, in memory if the cell is there.
    #[inline(always)]
    pub fn execute_at(&self, place: &Place, op: Op, a: i64, b: i64) -> Result<u64> {
        match place.execute(op, a as u64, b as u64) {
            Fast::Done(word) => Ok(word),
            fast => self.settle(fast, op, place.offset(), a, b),
        }
    }

    /// Goes on where the way through memory ended.
    #[inline(never)]
    fn settle(&self, fast: Fast, op: Op, offset: u32, a: i64, b: i64) -> Result<u64> {
        let cell = CellOp { op, array: self.number, offset, a: a as u64, b: b as u64 };
        self.go_on(fast, cell).map_err(|f| self.explain(f, op.name()))
    }

    fn go_on(&self, fast: Fast, op: CellOp) -> Result<u64, Failure> {
        match &self.client.core.shm {
            Some(shm) => shm.settle(fast, op),
            None => self.transport().execute(op),
        }
    }

    /// One operation on many cells; the words before it.
    pub fn execute_runs(&self, op: Op, runs: &[Run]) -> Result<Vec<u64>> {
        self.transport().execute_runs(op, self.number, runs).map_err(|f| self.explain(f, op.name()))
    }

    /// The word of a cell in memory that this is true of, if it comes soon and the
    /// client was told to spin: looks again and again, for less time than some ten
    /// waits take to be begun. Nothing is made for it, and the way out is short: what
    /// is waited for may be answered with the next instruction.
    #[inline(always)]
    pub fn spin(&self, place: &Place, mut comes: impl FnMut(u64) -> bool) -> Option<u64> {
        if self.client.core.link.spin().is_zero() {
            return None;
        }
        for _ in 0..SPINS {
            match place.execute(Op::Load, 0, 0) {
                Fast::Done(word) if comes(word) => return Some(word),
                Fast::Done(_) => std::hint::spin_loop(),
                _ => return None,
            }
        }
        None
    }

    /// Waits for one cell; the word that satisfied it. `None`: the time was
    /// over.
    pub fn wait_one(
        &self,
        place: &Place,
        record: WaitRecord,
        options: &WaitOptions,
    ) -> Result<Option<u64>> {
        if !options.is_plain() {
            return self.wait_by_server(record, options);
        }
        // A look at first: nothing need be done for what is so already.
        if options.cancel.is_none()
            && let Fast::Done(word) = place.execute(Op::Load, 0, 0)
        {
            let condition = match record.condition() {
                Ok(Some(condition)) => condition,
                _ if event_is_set(word) => return Ok(Some(word)),
                // From here on any transition will do. The record stays as it is: on
                // a server that knows nothing any more the count begins anew, and one
                // that comes behind these looks came before anybody could know of
                // this wait.
                _ => Condition { comparison: Comparison::Ne, value: value(word) },
            };
            if condition.holds(word) {
                return Ok(Some(word));
            }
        }
        self.transport()
            .wait_one(record, options.timeout, options.cancel.as_ref())
            .map_err(|f| self.explain(f, "wait"))
    }

    /// Waits for one cell as long as this session lives; the word that satisfied
    /// it. `None`: the time was over.
    pub fn wait_bound(
        &self,
        record: WaitRecord,
        options: &WaitOptions,
        session: u64,
    ) -> Result<Option<u64>> {
        if options.peers.is_empty()
            && let Some(shm) = &self.client.core.shm
        {
            let (timeout, cancel) = (options.timeout, options.cancel.as_ref());
            let patience = Patience { timeout, cancel, bound: Some(session) };
            return shm.wait_bound(record, &patience).map_err(|f| self.explain(f, "wait"));
        }
        let options = WaitOptions { bound: Some(session), ..options.clone() };
        self.wait_by_server(record, &options)
    }

    fn wait_by_server(&self, record: WaitRecord, options: &WaitOptions) -> Result<Option<u64>> {
        let woken = self.wait(1, &[record], options, |_| (0, 0))?;
        Ok(woken.cells().first().filter(|_| woken.is_satisfied()).map(|cell| cell.word))
    }

    /// Waits for cells. `cells` are those of the records, in order.
    pub fn wait(
        &self,
        need: usize,
        records: &[WaitRecord],
        options: &WaitOptions,
        cells: impl Fn(usize) -> (usize, usize),
    ) -> Result<Woken> {
        let total = self.check_wait(need, records)?;
        let (timeout, cancel) = (options.timeout, options.cancel.as_ref());
        let waited = if options.is_plain() {
            self.transport().wait(need as u32, records, timeout, cancel)
        } else {
            // The server knows who is here, so it is the one to ask.
            let patience = Patience { timeout, cancel, bound: options.bound };
            self.client.core.link.wait_for(need as u32, records, options.named()?, &patience)
        };
        let waited = waited.map_err(|f| self.explain(f, "wait"))?;
        Ok(Array::woken(waited, total, cells))
    }

    /// How many cells a wait is for, if it can be made.
    fn check_wait(&self, need: usize, records: &[WaitRecord]) -> Result<u64> {
        let total: u64 = records.iter().map(|r| u64::from(r.run.count)).sum();
        if total > wire::MAX_WAIT_CELLS as u64 {
            let what = format!(
                "a wait takes at most {} cells, asked for were {total}; wait on parts of array {:?}",
                wire::MAX_WAIT_CELLS,
                self.name
            );
            return Err(Error::BadSelection { what });
        }
        if need == 0 || need as u64 > total {
            let what = format!("a wait for {need} of {total} cells: from 1 to all are possible");
            return Err(Error::BadSelection { what });
        }
        Ok(total)
    }

    fn woken(waited: Waited, total: u64, cells: impl Fn(usize) -> (usize, usize)) -> Woken {
        let fired = waited.fired.into_iter().filter(|(i, _)| u64::from(*i) < total);
        let cells = fired
            .map(|(index, word)| {
                let (row, col) = cells(index as usize);
                Cell { row, col, word }
            })
            .collect();
        Woken { satisfied: waited.satisfied, cells }
    }

    /// As [`wait`](Self::wait), but the answer is given to `then`. `bound`: the
    /// session to which alone it means something.
    pub fn wait_then(
        self: &Arc<Self>,
        need: usize,
        records: &[WaitRecord],
        bound: Option<u64>,
        cells: impl Fn(usize) -> (usize, usize) + Send + 'static,
        then: impl FnOnce(Result<Woken>) + Send + 'static,
    ) -> Result<Pending> {
        let total = self.check_wait(need, records)?;
        // The array is kept: its number must mean the same until the end.
        let array = self.clone();
        let frame = tcp::wait_frame(need as u32, records);
        let ended = tcp::Then::Woken(Box::new(move |waited| {
            then(match waited {
                Ok(waited) => Ok(Array::woken(waited, total, cells)),
                Err(failure) => Err(array.explain(failure, "wait")),
            });
        }));
        self.client.core.link.wait_then(frame, bound, ended).map_err(|f| self.explain(f, "wait"))
    }

    /// A failure in terms of this array.
    pub fn explain(&self, failure: Failure, op: &'static str) -> Error {
        let name = self.name.clone();
        match failure {
            Failure::Error(error) => error,
            Failure::Refused(refusal, _) => match refusal {
                Refusal::NoArray | Refusal::Catalog(_) => Error::ArrayRemoved { name },
                Refusal::WrongKind(kind) => Error::WrongKind { name, kind, op },
                Refusal::ReadOnly => Error::ReadOnly { op },
                Refusal::TooManyWaits => Error::Limit {
                    addr: self.client.core.link.addr(),
                    what: "this session waits on as many cells as it may".to_owned(),
                },
                Refusal::StaleSeat => Error::LeaseLost { what: format!("array {name:?}") },
                Refusal::TooMuchLeft => Error::Limit {
                    addr: self.client.core.link.addr(),
                    what: "this session is a party of as many barriers as it may".to_owned(),
                },
                Refusal::OutOfRange
                | Refusal::TooLarge
                | Refusal::BadOperand
                | Refusal::BadPeer
                | Refusal::NameTaken(_)
                | Refusal::Slot(_) => self.client.senseless(&format!("a refusal ({refusal:?})")),
            },
        }
    }
}

/// What the handle of an array, and that of one of its cells, can do whatever
/// the cells are.
macro_rules! array_handle {
    ($array:ident, $one:ident, $many:ident, $word:literal) => {
        array_handle!($array, $one, $word);

        impl $array {
            #[doc = concat!("Every ", $word, ", row by row. No I/O.")]
            #[must_use]
            pub fn all(&self) -> $many {
                $many(Selection::all(&self.array))
            }

            #[doc = concat!("The ", $word, "s of a row. No I/O.")]
            ///
            /// # Errors
            /// [`Error::OutOfRange`](crate::Error::OutOfRange).
            pub fn row(&self, row: usize) -> Result<$many> {
                Selection::row(&self.array, row).map($many)
            }

            #[doc = concat!("The ", $word, "s of a column. No I/O.")]
            ///
            /// # Errors
            /// [`Error::OutOfRange`](crate::Error::OutOfRange).
            pub fn column(&self, col: usize) -> Result<$many> {
                Selection::column(&self.array, col).map($many)
            }

            #[doc = concat!("Any ", $word, "s, as `(row, column)`, in the order given. No I/O.")]
            ///
            /// # Errors
            /// [`Error::OutOfRange`](crate::Error::OutOfRange),
            /// [`Error::BadSelection`](crate::Error::BadSelection) for an empty
            /// list.
            pub fn cells(&self, cells: &[(usize, usize)]) -> Result<$many> {
                Selection::list(&self.array, cells).map($many)
            }
        }
    };
    ($array:ident, $one:ident, $word:literal) => {
        impl $array {
            pub(super) fn new(array: Arc<Array>) -> $array {
                $array { array }
            }

            /// Its name.
            #[must_use]
            pub fn name(&self) -> &str {
                &self.array.name
            }

            /// Rows.
            #[must_use]
            pub fn rows(&self) -> usize {
                self.array.rows()
            }

            /// Columns.
            #[must_use]
            pub fn cols(&self) -> usize {
                self.array.cols()
            }

            #[doc = concat!("One ", $word, ". No I/O.")]
            ///
            /// # Errors
            /// [`Error::OutOfRange`](crate::Error::OutOfRange).
            pub fn at(&self, row: usize, col: usize) -> Result<$one> {
                let offset = self.array.offset(row, col)?;
                Ok($one::new(&self.array, offset, row, col))
            }

            #[doc = concat!("The ", $word, " with this index, counted along the rows: `row * cols + col`.")]
            /// No I/O.
            ///
            /// # Errors
            /// [`Error::OutOfRange`](crate::Error::OutOfRange).
            pub fn flat(&self, index: usize) -> Result<$one> {
                self.at(index / self.cols(), index % self.cols())
            }
        }

        impl $one {
            /// Its row.
            #[must_use]
            pub fn row(&self) -> usize {
                self.row
            }

            /// Its column.
            #[must_use]
            pub fn col(&self) -> usize {
                self.col
            }
        }
    };
}
pub(super) use array_handle;
