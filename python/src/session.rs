//! Sessions: one connection a process, opened when it is first needed.
//!
//! A handle knows its **origin**, and an origin the address, the key and this
//! process's connection. A forked child inherits the memory but must not touch
//! the connection; each use compares the generation of the process, and a
//! child connects anew. A pickled handle carries the origin's random id and
//! nothing else of it; where it arrives, `farcell._sessions` finds what
//! belongs to the id.

use crate::errors::{OrRaise, exception, raise};
use crate::waiting;
use farcell::{Client, Key, Tls, TransportChoice};
use farcell_sys::fork::{self, Generation};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How a process connects. Compared by what it says, so that two handles that
/// came by different ways share a connection.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Settings {
    pub address: Option<String>,
    pub key: Option<Vec<u8>>,
    pub key_file: Option<String>,
    pub transport: Option<String>,
    pub device: Option<String>,
    pub tls: Option<String>,
    pub clear_rdma: bool,
    pub job: String,
    pub timeout: Option<Duration>,
    pub wait_for_server: Option<Duration>,
    pub reconnect_for: Option<Duration>,
    pub spin: Option<Duration>,
}

impl Settings {
    fn connect(&self) -> farcell::Result<Client> {
        let bad = |what| farcell::Error::BadSetting { what };
        let mut builder = Client::builder().job(self.job.clone());
        if let Some(address) = &self.address {
            builder = builder.addr(address.clone());
        }
        if let Some(key) = &self.key {
            builder = builder.key(Key::new(key.clone())?);
        }
        if let Some(path) = &self.key_file {
            builder = builder.key_file(path);
        }
        if let Some(name) = &self.transport {
            builder = builder.transport(name.parse::<TransportChoice>().map_err(bad)?);
        }
        if let Some(tls) = &self.tls {
            builder = builder.tls(tls.parse::<Tls>().map_err(bad)?);
        }
        if self.clear_rdma {
            builder = builder.clear_rdma();
        }
        if let Some(device) = &self.device {
            builder = builder.device(device.clone());
        }
        if let Some(time) = self.timeout {
            builder = builder.connect_timeout(time);
        }
        if let Some(time) = self.wait_for_server {
            builder = builder.wait_for_server(time);
        }
        if let Some(time) = self.reconnect_for {
            builder = builder.reconnect_for(time);
        }
        if let Some(time) = self.spin {
            builder = builder.spin(time);
        }
        builder.connect()
    }
}

/// Where handles come from.
pub struct Origin {
    pub id: String,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// `None` until a handle that came from elsewhere is used here.
    settings: Option<Settings>,
    client: Option<(Generation, Client)>,
    closed: bool,
}

/// The origins of this process, by their id.
static ORIGINS: Mutex<Option<HashMap<String, Weak<Origin>>>> = Mutex::new(None);

impl Origin {
    /// A new origin that is known by its id.
    fn new(id: String, settings: Option<Settings>) -> Arc<Origin> {
        let state = State { settings, ..State::default() };
        let origin = Arc::new(Origin { id: id.clone(), state: Mutex::new(state) });
        let mut origins = lock(&ORIGINS);
        let origins = origins.get_or_insert_default();
        origins.retain(|_, known| known.strong_count() > 0);
        origins.insert(id, Arc::downgrade(&origin));
        origin
    }

    /// The origin of a handle that was unpickled.
    pub fn by_id(id: &str) -> Arc<Origin> {
        let known = lock(&ORIGINS).as_ref().and_then(|all| all.get(id)?.upgrade());
        known.unwrap_or_else(|| Origin::new(id.to_owned(), None))
    }

    /// This process's connection, made now if there is none. All locks here
    /// are held with the interpreter's lock and never while anything blocks:
    /// so no thread can hold one while another forks.
    pub fn client(&self, py: Python<'_>) -> PyResult<Client> {
        waiting::watch_signals();
        let now = fork::generation();
        let settings = {
            let mut state = lock(&self.state);
            if state.closed {
                return Err(raise(py, "Closed", "this client was closed"));
            }
            match &state.client {
                Some((born, client)) if *born == now => return Ok(client.clone()),
                // The parent's: let go of it, which touches nothing.
                Some(_) => state.client = None,
                None => {}
            }
            state.settings.clone()
        };
        let sessions = py.import("farcell._sessions")?;
        let settings = match settings {
            Some(settings) => settings,
            None => {
                let found = sessions.call_method1("_find", (&self.id,))?;
                if let Ok(other) = found.cast::<Session>() {
                    // The process has a session of its own to that server.
                    let client = other.get().origin.client(py)?;
                    lock(&self.state).client = Some((now, client.clone()));
                    return Ok(client);
                }
                let settings = settings_from(found.cast::<PyDict>()?)?;
                lock(&self.state).settings = Some(settings.clone());
                settings
            }
        };
        let client = waiting::apart(py, move || settings.connect())?;
        let client = {
            let mut state = lock(&self.state);
            match &state.client {
                // Another thread was faster, one that connects or one that closes.
                _ if state.closed => Err(client),
                Some((born, first)) if *born == now => Ok(first.clone()),
                _ => {
                    state.client = Some((now, client.clone()));
                    Ok(client)
                }
            }
        };
        let client = match client {
            Ok(client) => client,
            Err(unwanted) => {
                py.detach(|| unwanted.close());
                return Err(raise(py, "Closed", "this client was closed"));
            }
        };
        sessions.call_method0("_opened")?;
        Ok(client)
    }
}

fn seconds(value: Option<f64>) -> PyResult<Option<Duration>> {
    // Less than nothing is nothing, but what is no number is no time.
    let time = |seconds: f64| {
        let seconds = if seconds < 0.0 { 0.0 } else { seconds };
        Duration::try_from_secs_f64(seconds).map_err(|e| {
            pyo3::exceptions::PyValueError::new_err(format!("{seconds:?} seconds: {e}"))
        })
    };
    value.map(time).transpose()
}

fn settings_from(dict: &Bound<'_, PyDict>) -> PyResult<Settings> {
    fn get<'py, T>(dict: &Bound<'py, PyDict>, name: &str) -> PyResult<Option<T>>
    where
        T: for<'a> FromPyObject<'a, 'py, Error = PyErr>,
    {
        match dict.get_item(name)? {
            Some(value) if !value.is_none() => value.extract::<T>().map(Some),
            _ => Ok(None),
        }
    }
    Ok(Settings {
        address: get(dict, "address")?,
        key: get(dict, "authkey")?,
        key_file: get(dict, "authkey_file")?,
        transport: get(dict, "transport")?,
        device: get(dict, "device")?,
        tls: get(dict, "tls")?,
        clear_rdma: get(dict, "clear_rdma")?.unwrap_or_default(),
        job: get(dict, "job")?.unwrap_or_default(),
        timeout: seconds(get(dict, "timeout")?)?,
        wait_for_server: seconds(get(dict, "wait_for_server")?)?,
        reconnect_for: seconds(get(dict, "reconnect_for")?)?,
        spin: seconds(get(dict, "spin")?)?,
    })
}

/// A session with a server, as `farcell.Client` has it inside.
#[pyclass(frozen, subclass, module = "farcell._native")]
pub struct Session {
    pub origin: Arc<Origin>,
}

#[pymethods]
impl Session {
    /// Knows how to connect; connects when it is first used.
    #[new]
    #[pyo3(signature = (id, settings))]
    fn new(id: String, settings: &Bound<'_, PyDict>) -> PyResult<Session> {
        Ok(Session { origin: Origin::new(id, Some(settings_from(settings)?)) })
    }

    #[getter]
    fn _id(&self) -> &str {
        &self.origin.id
    }

    /// Connects now, unless that was done before.
    fn _open(&self, py: Python<'_>) -> PyResult<()> {
        self.origin.client(py).map(drop)
    }

    /// Whether this process has a connection to this server.
    fn _is_open(&self) -> bool {
        let now = fork::generation();
        lock(&self.origin.state).client.as_ref().is_some_and(|(born, _)| *born == now)
    }

    /// The descriptor of this process's connection, for the hook around a fork.
    fn _fd(&self) -> Option<i32> {
        let state = lock(&self.origin.state);
        state.client.as_ref().and_then(|(_, client)| client.connection_fd())
    }

    /// Whether there is a connection at this moment.
    fn is_connected(&self) -> bool {
        let state = lock(&self.origin.state);
        let now = fork::generation();
        state.client.as_ref().is_some_and(|(born, client)| *born == now && client.is_connected())
    }

    /// Whether there is a connection at this moment, and it is encrypted.
    fn is_encrypted(&self) -> bool {
        let state = lock(&self.origin.state);
        let now = fork::generation();
        state.client.as_ref().is_some_and(|(born, client)| *born == now && client.is_encrypted())
    }

    /// Ends the session, for this process.
    fn close(&self, py: Python<'_>) {
        let client = {
            let mut state = lock(&self.origin.state);
            state.closed = true;
            state.client.take()
        };
        if let Some((born, client)) = client
            && born == fork::generation()
        {
            py.detach(|| client.close());
        }
    }

    /// Name of the transport, and the reasons.
    fn _transport(&self, py: Python<'_>) -> PyResult<(String, Vec<String>)> {
        let report = self.origin.client(py)?.transport();
        Ok((report.name.to_owned(), report.reasons))
    }

    /// Every array: name, kind, rows, columns.
    fn _list(&self, py: Python<'_>) -> PyResult<Vec<(String, &'static str, usize, usize)>> {
        let client = self.origin.client(py)?;
        let all = py.detach(|| client.list()).or_raise(py)?;
        Ok(all.into_iter().map(|a| (a.name, a.kind.name(), a.rows, a.cols)).collect())
    }

    /// Calls this process's session so, for others to name it in their waits.
    fn join(&self, py: Python<'_>, name: &str) -> PyResult<()> {
        let client = self.origin.client(py)?;
        py.detach(|| client.join(name)).or_raise(py)
    }

    /// The names of the sessions that live and have one.
    fn members(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        let client = self.origin.client(py)?;
        let all = py.detach(|| client.members()).or_raise(py)?;
        Ok(all.into_iter().filter_map(|member| member.name).collect())
    }

    /// Whether there are counters of this name.
    fn _has(&self, py: Python<'_>, name: &str) -> PyResult<bool> {
        let client = self.origin.client(py)?;
        match py.detach(|| client.open_counters(name)) {
            Ok(_) => Ok(true),
            Err(farcell::Error::NoSuchArray { .. }) => Ok(false),
            Err(error) => Err(exception(py, &error)),
        }
    }

    /// Removes an array.
    fn remove(&self, py: Python<'_>, name: &str) -> PyResult<()> {
        let client = self.origin.client(py)?;
        py.detach(|| client.remove(name)).or_raise(py)
    }

    /// What the server tells of itself.
    fn info<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let client = self.origin.client(py)?;
        let info = py.detach(|| client.info()).or_raise(py)?;
        let dict = PyDict::new(py);
        dict.set_item("capacity", info.capacity)?;
        dict.set_item("free", info.free)?;
        dict.set_item("largest_free", info.largest_free)?;
        dict.set_item("sessions", info.sessions)?;
        dict.set_item("arrays", info.arrays)?;
        dict.set_item("parked_waits", info.parked_waits)?;
        dict.set_item("domain", info.domain.to_string())?;
        let read_only = info.access == farcell::Access::ReadOnly;
        dict.set_item("access", if read_only { "read-only" } else { "read-write" })?;
        dict.set_item("lease", info.lease.as_secs_f64())?;
        Ok(dict)
    }
}

/// The bytes of the key in the file that the environment names, or of the
/// user's own file; made if `create`.
#[pyfunction]
pub fn load_key<'py>(
    py: Python<'py>,
    path: Option<String>,
    create: bool,
) -> PyResult<Bound<'py, PyBytes>> {
    let path = match path {
        Some(path) => path.into(),
        None => farcell::key_path_from_env().or_raise(py)?,
    };
    let key = match create {
        true => farcell::load_or_create_key(&path).map(|(key, _)| key),
        false => farcell::load_key(&path),
    };
    Ok(PyBytes::new(py, key.or_raise(py)?.expose()))
}

/// The descriptors of this process's connections.
#[pyfunction]
pub fn open_fds() -> Vec<i32> {
    let origins: Vec<_> = match &*lock(&ORIGINS) {
        Some(all) => all.values().filter_map(Weak::upgrade).collect(),
        None => Vec::new(),
    };
    let fd = |origin: &Arc<Origin>| lock(&origin.state).client.as_ref()?.1.connection_fd();
    origins.iter().filter_map(fd).collect()
}

/// Ends every session of this process, as it ends.
#[pyfunction]
pub fn close_all(py: Python<'_>) {
    let origins: Vec<_> = match &*lock(&ORIGINS) {
        Some(all) => all.values().filter_map(Weak::upgrade).collect(),
        None => Vec::new(),
    };
    for origin in origins {
        let client = lock(&origin.state).client.take();
        if let Some((born, client)) = client
            && born == fork::generation()
        {
            py.detach(|| client.close());
        }
    }
    waiting::let_tell(py);
}
