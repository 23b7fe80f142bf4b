//! `farcell`: the server, and everything a person or a script wants from one.

mod add;
mod args;
mod bench;
mod cas;
mod clear;
mod completions;
mod connection;
mod create;
mod demo;
mod doctor;
mod failure;
mod get;
mod ls;
mod man;
mod manager;
mod members;
mod output;
mod ready;
mod rm;
mod serve;
mod set;
mod signals;
mod slot;
mod snapshot;
mod surroundings;
mod take;
mod top;
mod wait;
mod watch;

use clap::parser::ValueSource;
use clap::{ArgMatches, CommandFactory, FromArgMatches, Parser, Subcommand};
use connection::Connection;
use failure::{Answer, Failure};
use output::Output;
use std::process::ExitCode;

/// Shared events, counters, locks and messages for programs on many machines.
///
/// A server holds named arrays of events, counters, locks and messages; programs
/// and people
/// anywhere set, clear, test, take, count, lock and wait.
#[derive(Debug, Parser)]
#[command(name = "farcell", version, after_help = AFTER_HELP)]
#[command(subcommand_required = true, arg_required_else_help = true)]
struct Cli {
    #[command(flatten)]
    global: Global,
    #[command(subcommand)]
    command: Command,
}

/// What every command understands.
#[derive(Debug, clap::Args)]
struct Global {
    /// Print JSON, one object a line, in place of text
    #[arg(long, global = true, display_order = 1000)]
    json: bool,
    /// Log more to stderr; repeat for still more (see FARCELL_LOG)
    #[arg(short, long, global = true, display_order = 1001, action = clap::ArgAction::Count)]
    verbose: u8,
    #[command(flatten)]
    connection: Connection,
}

const AFTER_HELP: &str = "\
Cells:
  NAME            the whole array
  NAME ROW        a row
  NAME ROW COL    one cell; `:` for ROW or COL means all of them

Exit codes:
  0  yes, or done
  1  no, or the time was over
  2  the command line is wrong
  3  the server cannot be reached
  4  the server, or a rule, refused
  5  anything else failed

Environment:
  FARCELL_ADDR          the server, HOST:PORT; localhost:7117 without it
  FARCELL_AUTHKEY_FILE  the file with the key; ~/.config/farcell/authkey without it
  FARCELL_LOG           what to log to stderr, for example debug, or
                        farcell::rdma=debug,info

If something does not work, `farcell doctor` says what and how to mend it.

Start with `farcell serve` in one terminal, and in another
  farcell create go:event:4x4
  farcell wait go 0 1 &
  farcell set go 0 1";

#[derive(Debug, Subcommand)]
enum Command {
    Serve(Box<serve::Serve>),
    Snapshot(snapshot::Snapshot),
    Ls(ls::Ls),
    Members(members::Members),
    Create(create::Create),
    Rm(rm::Rm),
    Get(get::Get),
    Set(set::Set),
    Clear(clear::Clear),
    Take(take::Take),
    Slot(slot::Slot),
    Wait(wait::Wait),
    Add(add::Add),
    Cas(cas::Cas),
    Watch(watch::Watch),
    Top(top::Top),
    Bench(bench::Bench),
    Doctor(doctor::Doctor),
    Demo(demo::Demo),
    Completions(completions::Completions),
    Man(man::Man),
}

fn main() -> ExitCode {
    // Not a command that a person could want.
    if std::env::args_os().nth(1).is_some_and(|arg| arg == demo::COMMAND) {
        return demo::learner();
    }
    match run() {
        Ok(Answer::Yes) => ExitCode::SUCCESS,
        Ok(Answer::No) => ExitCode::from(1),
        Err(failure) => {
            output::complain(&failure.to_string());
            ExitCode::from(failure.code())
        }
    }
}

fn run() -> Result<Answer, Failure> {
    let matches = match Cli::command().try_get_matches() {
        Ok(matches) => matches,
        Err(error) => return output::usage(&error),
    };
    let cli = Cli::from_arg_matches(&matches).map_err(|e| Failure::Usage(e.to_string()))?;
    let Global { connection, json, verbose } = cli.global;
    let is_server = matches!(cli.command, Command::Serve(_));
    surroundings::start_log(verbose, is_server)?;
    // The doctor has a check for them.
    if !matches!(cli.command, Command::Doctor(_)) {
        surroundings::warn_of_unknown_variables();
    }
    let out = Output::new(json);
    match cli.command {
        Command::Serve(serve) => {
            refuse_given(&matches, &CLIENT_ARGS[2..])?;
            serve.run(&connection, &out)
        }
        Command::Snapshot(snapshot) => {
            refuse_given(&matches, &CLIENT_ARGS)?;
            snapshot.run(&out)
        }
        Command::Demo(demo) => {
            refuse_given(&matches, &CLIENT_ARGS)?;
            demo.run(&out)
        }
        Command::Ls(ls) => ls.run(&connection, &out),
        Command::Members(members) => members.run(&connection, &out),
        Command::Create(create) => create.run(&connection, &out),
        Command::Rm(rm) => rm.run(&connection, &out),
        Command::Get(get) => get.run(&connection, &out),
        Command::Set(set) => set.run(&connection, &out),
        Command::Clear(clear) => clear.run(&connection, &out),
        Command::Take(take) => take.run(&connection, &out),
        Command::Slot(slot) => slot.run(&connection, &out),
        Command::Wait(wait) => wait.run(&connection, &out),
        Command::Add(add) => add.run(&connection, &out),
        Command::Cas(cas) => cas.run(&connection, &out),
        Command::Watch(watch) => watch.run(&connection, &out),
        Command::Top(top) => top.run(connection, &out),
        Command::Doctor(doctor) => doctor.run(&connection, &out),
        Command::Bench(bench) => bench.run(&connection, &out),
        Command::Man(man) => {
            refuse_given(&matches, &CLIENT_ARGS)?;
            man.run(&out, Cli::command())
        }
        Command::Completions(completions) => completions.run(&out, &mut Cli::command()),
    }
}

/// Arguments of the connection, which are global. The first two are for servers as
/// well.
const CLIENT_ARGS: [&str; 9] = [
    "authkey_file",
    "tls",
    "addr",
    "transport",
    "device",
    "gid_index",
    "connect_timeout",
    "wait_server",
    "reconnect",
];

/// Refuses arguments that were given to a command which would ignore them.
fn refuse_given(matches: &ArgMatches, names: &[&str]) -> Result<(), Failure> {
    let (command, inner) = matches.subcommand().unwrap_or(("", matches));
    for name in names {
        if inner.value_source(name) != Some(ValueSource::CommandLine) {
            continue;
        }
        let name = name.replace('_', "-");
        return Err(Failure::Usage(format!(
            "--{name} is for clients and means nothing to `farcell {command}`; see `farcell {command} --help`"
        )));
    }
    Ok(())
}
