//! Why the server refuses what it is asked, and how it says so.

use super::{ErrorRecord, slots};
use crate::catalog::{CatalogError, Form, Kind, NameError};
use crate::layout::Shape;

/// Why the server did not carry out a request. Nothing was changed by it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The session's number names no array, or one that was removed.
    NoArray,
    /// The operation is none of the array's kind.
    WrongKind(Kind),
    /// The offset lies outside of the array.
    OutOfRange,
    /// An operand needs more than 63 bits.
    TooLarge,
    /// The session is read-only.
    ReadOnly,
    /// The catalog's answer.
    Catalog(CatalogError),
    /// More cells waited for than a session may.
    TooManyWaits,
    /// The seat is not that of this session, which may be another one by now.
    StaleSeat,
    /// An operand does not belong to this array.
    BadOperand,
    /// What the session wants to be called is no name.
    BadPeer,
    /// The living session with this seat is called so.
    NameTaken(u32),
    /// More parties or bequests than a session may have.
    TooMuchLeft,
    /// The answer to a request for a message.
    Slot(slots::SlotRefusal),
}

impl Refusal {
    /// The record that says so.
    #[must_use]
    pub fn record(&self, index: u32) -> ErrorRecord {
        let (code, detail) = match self {
            Refusal::NoArray => (1, [0; 3]),
            Refusal::WrongKind(kind) => (2, [*kind as u64, 0, 0]),
            Refusal::OutOfRange => (3, [0; 3]),
            Refusal::TooLarge => (4, [0; 3]),
            Refusal::ReadOnly => (5, [0; 3]),
            Refusal::TooManyWaits => (6, [0; 3]),
            Refusal::StaleSeat => (32, [0; 3]),
            Refusal::BadOperand => (33, [0; 3]),
            Refusal::BadPeer => (34, [0; 3]),
            Refusal::NameTaken(seat) => (35, [u64::from(*seat), 0, 0]),
            Refusal::TooMuchLeft => (36, [0; 3]),
            Refusal::Slot(refusal) => refusal.code(),
            Refusal::Catalog(e) => match e {
                CatalogError::Name(NameError::Empty) => (16, [0; 3]),
                CatalogError::Name(NameError::TooLong(n)) => (17, [*n as u64, 0, 0]),
                CatalogError::Name(NameError::BadCharacter(c, at)) => {
                    (18, [u64::from(*c), *at as u64, 0])
                }
                CatalogError::Name(NameError::BadStart(c)) => (19, [u64::from(*c), 0, 0]),
                CatalogError::Empty(s) => (20, [0, s.rows.into(), s.cols.into()]),
                CatalogError::Mismatch(form) => {
                    let Form { kind, shape, param } = *form;
                    let both = u64::from(shape.rows) << 32 | u64::from(shape.cols);
                    (21, [kind as u64, both, param])
                }
                CatalogError::Param(param) => (25, [*param, 0, 0]),
                CatalogError::Missing => (22, [0; 3]),
                CatalogError::Full { asked, free, largest } => (23, [*asked, *free, *largest]),
                CatalogError::TooMany => (24, [0; 3]),
                CatalogError::Unkept(errno) => (56, [u64::from(errno.cast_unsigned()), 0, 0]),
                CatalogError::SlotsFull { asked, free } => (54, [*asked, *free, 0]),
                CatalogError::NoMemory { asked, errno } => (55, [*asked, (*errno).into(), 0]),
            },
        };
        ErrorRecord { code, reserved: 0, index, detail }
    }

    /// What a record says, `None` if this version does not know it.
    #[must_use]
    pub fn from_record(record: &ErrorRecord) -> Option<Refusal> {
        let [a, b, c] = record.detail;
        let small = |n: u64| u32::try_from(n).ok();
        let character = |n: u64| small(n).and_then(char::from_u32);
        let kind = |n: u64| u8::try_from(n).ok().and_then(Kind::from_code);
        let shape = || Some(Shape { rows: small(b)?, cols: small(c)? });
        Some(match record.code {
            1 => Refusal::NoArray,
            2 => Refusal::WrongKind(kind(a)?),
            3 => Refusal::OutOfRange,
            4 => Refusal::TooLarge,
            5 => Refusal::ReadOnly,
            6 => Refusal::TooManyWaits,
            16 => Refusal::Catalog(NameError::Empty.into()),
            17 => Refusal::Catalog(NameError::TooLong(small(a)? as usize).into()),
            18 => {
                Refusal::Catalog(NameError::BadCharacter(character(a)?, small(b)? as usize).into())
            }
            19 => Refusal::Catalog(NameError::BadStart(character(a)?).into()),
            20 => Refusal::Catalog(CatalogError::Empty(shape()?)),
            21 => {
                let shape = Shape { rows: (b >> 32) as u32, cols: b as u32 };
                let form = Form { kind: kind(a)?, shape, param: c };
                Refusal::Catalog(CatalogError::Mismatch(form))
            }
            22 => Refusal::Catalog(CatalogError::Missing),
            23 => Refusal::Catalog(CatalogError::Full { asked: a, free: b, largest: c }),
            24 => Refusal::Catalog(CatalogError::TooMany),
            25 => Refusal::Catalog(CatalogError::Param(a)),
            32 => Refusal::StaleSeat,
            33 => Refusal::BadOperand,
            34 => Refusal::BadPeer,
            35 => Refusal::NameTaken(small(a)?),
            36 => Refusal::TooMuchLeft,
            56 => Refusal::Catalog(CatalogError::Unkept(small(a)?.cast_signed())),
            54 | 55 => Refusal::Catalog(slots::memory_refusal(record.code, a, b)?),
            code => Refusal::Slot(slots::SlotRefusal::from_code(code, a)?),
        })
    }
}
