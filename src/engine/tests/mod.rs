//! The engine without sockets.

mod cases;
mod former;
mod hostile;
mod interleavings;
mod local;
mod model;
mod moment;
mod overview;
mod schedules;
mod simulation;
mod slots;
mod sync;
mod threads;

use crate::wire::{
    self, Header, OpRecord, OpenRecord, RunRecord, RunsHead, Tag, WaitHead, WaitRecord,
};
use model::{Ask, Cells, OneOp, Until};

/// A header and its payload.
type Frame = (Header, Vec<u8>);

/// The frames that `bytes` consist of, and of nothing else.
fn frames(mut bytes: &[u8]) -> Vec<Frame> {
    let mut frames = Vec::new();
    while !bytes.is_empty() {
        let (header, payload) = wire::split(bytes).unwrap().expect("only whole frames go out");
        frames.push((header, payload.to_vec()));
        bytes = &bytes[wire::HEADER + payload.len()..];
    }
    frames
}

fn records<T: bytemuck::Pod>(records: impl IntoIterator<Item = T>) -> Vec<u8> {
    records.into_iter().flat_map(|r| bytemuck::bytes_of(&r).to_vec()).collect()
}

fn run((offset, count, stride): Cells) -> RunRecord {
    RunRecord { offset, count, stride }
}

/// The frame that asks this.
fn encode(ask: &Ask, id: u64, span: u64) -> Vec<u8> {
    let (tag, payload) = match ask {
        Ask::Ops(ops) => {
            let record = |&(op, array, offset, a, b): &OneOp| {
                let (a, b) = (a as u64, b as u64);
                OpRecord { op, reserved: 0, array, offset, a, b }
            };
            (Tag::Ops, records(ops.iter().map(record)))
        }
        Ask::Runs(op, array, runs) => {
            let head = records([RunsHead { op: *op, reserved: [0; 5], array: *array }]);
            (Tag::Runs, [head, records(runs.iter().map(|&r| run(r)))].concat())
        }
        Ask::Open { number, name, kind, rows, cols } => {
            let (rows, cols) = (*rows, *cols);
            let record =
                OpenRecord { array: *number, kind: *kind, rows, cols, ..Default::default() };
            (Tag::Open, [records([record]), name.as_bytes().to_vec()].concat())
        }
        Ask::Remove(name) => (Tag::Remove, name.as_bytes().to_vec()),
        Ask::List(name) => (Tag::List, name.as_bytes().to_vec()),
        Ask::Info => (Tag::GetInfo, Vec::new()),
        Ask::Wait { need, records: untils } => {
            let record = |&(array, comparison, cells, value): &Until| WaitRecord {
                array,
                comparison,
                reserved: 0,
                run: run(cells),
                value,
            };
            let head = records([WaitHead { need: *need, peers: 0 }]);
            (Tag::Wait, [head, records(untils.iter().map(record))].concat())
        }
        Ask::Cancel => (Tag::Cancel, Vec::new()),
        Ask::WaitDone => (Tag::WaitDone, Vec::new()),
        Ask::Heartbeat => (Tag::Heartbeat, Vec::new()),
        Ask::Bye => (Tag::Bye, Vec::new()),
    };
    let header = Header { span: span as u16, ..Header::new(tag, id, payload.len()) };
    [bytemuck::bytes_of(&header), &payload].concat()
}
