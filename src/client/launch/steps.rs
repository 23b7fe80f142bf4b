//! The steps of the search for a server, in words.

use super::{
    DEFAULT_PORT, ENV_ADDR, ENV_ADDR_FILE, Launch, environment, named_address_file, read_address,
};
use std::path::Path;

/// A place where [`Client::from_env`](crate::Client::from_env) looks for the
/// server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// `environment`, `address file`, `launcher` or `this machine`.
    pub place: &'static str,
    /// What is there, in a sentence.
    pub what: String,
    /// The address that it gives, if it gives one.
    pub address: Option<String>,
    /// It settles the matter: what comes behind it is not looked at.
    pub decides: bool,
    /// Rank 0 of a launch, which has no server to look for: it serves.
    pub serves: bool,
}

impl Step {
    fn nothing(place: &'static str, what: String) -> Step {
        Step { place, what, address: None, decides: false, serves: false }
    }

    fn found(place: &'static str, what: String, address: String) -> Step {
        Step { place, what, address: Some(address), decides: true, serves: false }
    }
}

/// What [`Client::from_env`](crate::Client::from_env) would look at here, up to the
/// step that decides. Serves and connects to nothing; reads the address files.
#[must_use]
pub fn steps() -> Vec<Step> {
    let mut steps = Vec::new();
    let mut decided = |step: Step| {
        let decides = step.decides;
        steps.push(step);
        decides
    };
    let _ = decided(in_environment())
        || address_file().is_some_and(&mut decided)
        || launcher(Launch::from_env().as_ref()).into_iter().any(&mut decided)
        || decided(Step {
            address: Some(format!("localhost:{DEFAULT_PORT}")),
            decides: true,
            ..Step::nothing("this machine", this_machine())
        });
    steps
}

fn in_environment() -> Step {
    match environment(ENV_ADDR) {
        Some(address) => {
            Step::found("environment", format!("{ENV_ADDR} names the server {address}"), address)
        }
        None => Step::nothing("environment", format!("{ENV_ADDR} is not set")),
    }
}

fn address_file() -> Option<Step> {
    let path = named_address_file()?;
    let shown = path.display();
    Some(match read_address(&path) {
        Some(address) => {
            let what = format!("the address file {shown} names {address}");
            Step::found("address file", what, address)
        }
        None if environment(ENV_ADDR_FILE).is_some() => Step::nothing(
            "address file",
            format!("no address in {shown}, which {ENV_ADDR_FILE} names"),
        ),
        None => Step::nothing("address file", format!("no address in {shown}")),
    })
}

/// What the launcher says, and then what follows from it.
fn launcher(launch: Option<&Launch>) -> Vec<Step> {
    let Some(launch) = launch else {
        let what = "no launcher: neither torchrun, Open MPI, Hydra nor srun".to_owned();
        return vec![Step::nothing("launcher", what)];
    };
    let Launch { launcher, rank, size, job, .. } = launch;
    let who = format!("{launcher} started this as rank {rank} of {size}, job {job:?}");
    let serves = *rank == 0;
    let (what, address) = match launch.address_file() {
        Err(error) => (error.to_string(), None),
        Ok(path) if serves => (rank_0(launch, &path), read_address(&path)),
        Ok(path) => {
            (format!("rank 0 leaves its address in {}", path.display()), read_address(&path))
        }
    };
    let last = Step { address, decides: true, serves, ..Step::nothing("launcher", what) };
    vec![Step::nothing("launcher", who), last]
}

fn rank_0(launch: &Launch, path: &Path) -> String {
    let bind = launch.bind();
    format!("rank 0 serves on a free port of {bind} and leaves the address in {}", path.display())
}

fn this_machine() -> String {
    format!(
        "the server of this user at localhost:{DEFAULT_PORT} if there is one, otherwise a private one inside of the process"
    )
}

/// What [`Client::from_env`](crate::Client::from_env) would do here, a sentence for
/// each step that it looks at, the last one being what it does. Serves and
/// connects to nothing.
#[must_use]
pub fn explain() -> Vec<String> {
    steps().into_iter().map(|step| step.what).collect()
}
