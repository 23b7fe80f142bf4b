//! Changes as lines, for scripts and files.

use super::look::{Look, News};
use crate::failure::{Answer, Failure};
use crate::output::{Output, complain};
use farcell::Kind;
use serde::Serialize;
use std::sync::mpsc::Receiver;

#[derive(Serialize)]
struct Change<'a> {
    name: &'a str,
    kind: &'a str,
    row: usize,
    col: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    set: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    transitions: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    value: Option<i64>,
    waiters: usize,
}

/// Prints changes until it is asked to end, has seen enough, or nobody reads.
pub fn print(
    name: &str,
    looks: Option<u64>,
    arrivals: &Receiver<News>,
    out: &Output,
) -> Result<Answer, Failure> {
    let mut before: Option<Look> = None;
    let mut looked = 0;
    let mut trouble = None;
    // Without a sender there is nothing more to see.
    while let Ok(news) = arrivals.recv() {
        match news {
            News::Look(look) => {
                let mut text = String::new();
                for change in changes(name, &look, before.as_ref()) {
                    text.push_str(&line(&change, out.json)?);
                }
                if !text.is_empty() && !out.text(text)? {
                    break;
                }
                before = Some(look);
                trouble = None;
                looked += 1;
                if looks.is_some_and(|n| looked >= n) {
                    break;
                }
            }
            News::Trouble(state) => {
                // Once, not at every attempt.
                if trouble.is_none() {
                    complain(&format!("watch {name}: {state}"));
                }
                trouble = Some(state);
            }
            News::End(failure) => return Err(failure),
            News::Asked => break,
        }
    }
    Ok(Answer::Yes)
}

fn changes<'a>(name: &'a str, look: &Look, before: Option<&Look>) -> Vec<Change<'a>> {
    let changed = look.changes(before);
    let is_event = look.kind == Kind::Event;
    let cells = changed.iter().enumerate().filter(|(_, changed)| **changed);
    cells
        .map(|(i, _)| {
            let number = look.numbers[i];
            Change {
                name,
                kind: look.kind.name(),
                row: i / look.seen_cols,
                col: i % look.seen_cols,
                set: is_event.then_some(number & 1 == 1),
                transitions: is_event.then_some(number),
                value: (!is_event).then_some(number),
                waiters: look.waiters.get(i).copied().unwrap_or(0),
            }
        })
        .collect()
}

fn line(change: &Change, json: bool) -> Result<String, Failure> {
    if json {
        return serde_json::to_string(change)
            .map(|line| line + "\n")
            .map_err(|e| Failure::Other(format!("cannot write a change as JSON: {e}")));
    }
    let (row, col) = (change.row, change.col);
    Ok(match (change.set, change.transitions, change.value) {
        (Some(true), Some(n), _) => format!("{row} {col} set {n}\n"),
        (Some(false), Some(n), _) => format!("{row} {col} clear {n}\n"),
        (_, _, value) => format!("{row} {col} {}\n", value.unwrap_or(0)),
    })
}
