//! A server in this process.

use crate::errors::{OrRaise, raise};
use crate::session::lock;
use farcell::{Key, RdmaChoice, Server as Native, Tls};
use farcell_sys::fork::{self, Generation};
use pyo3::prelude::*;
use std::mem::ManuallyDrop;
use std::sync::Mutex;
use std::time::Duration;

/// A server that runs in this process.
#[pyclass(frozen, subclass, module = "farcell._native")]
pub struct Server {
    /// Never dropped by itself: a forked child has no threads to wait for.
    native: Mutex<Option<ManuallyDrop<Native>>>,
    born: Generation,
    address: String,
    listening: Vec<String>,
    metrics: Vec<String>,
}

impl Server {
    fn end(&self, py: Python<'_>) {
        let native = lock(&self.native).take();
        if let Some(native) = native
            && fork::generation() == self.born
        {
            py.detach(|| drop(ManuallyDrop::into_inner(native)));
        }
    }
}

#[pymethods]
impl Server {
    #[new]
    #[pyo3(signature = (key, binds, capacity, workers, lease, spin, max_clients, read_only_key, rdma, cpu_domain, job, tls, clear_rdma, metrics))]
    #[expect(clippy::too_many_arguments, reason = "farcell.serve gives each a name")]
    fn new(
        py: Python<'_>,
        key: Vec<u8>,
        binds: Vec<String>,
        capacity: Option<u32>,
        workers: Option<usize>,
        lease: Option<f64>,
        spin: Option<f64>,
        max_clients: Option<usize>,
        read_only_key: Option<Vec<u8>>,
        rdma: &str,
        cpu_domain: bool,
        job: &str,
        tls: &str,
        clear_rdma: bool,
        metrics: Option<String>,
    ) -> PyResult<Server> {
        let key_of = |bytes| Key::new(bytes).map_err(farcell::Error::from);
        let time = |seconds: f64| {
            Duration::try_from_secs_f64(seconds)
                .map_err(|e| raise(py, "BadArgument", &format!("{seconds:?} seconds: {e}")))
        };
        let mut builder = Native::builder(key_of(key).or_raise(py)?).job(job);
        for bind in binds {
            builder = builder.bind(bind);
        }
        if let Some(cells) = capacity {
            builder = builder.capacity(cells);
        }
        if let Some(workers) = workers {
            builder = builder.workers(workers);
        }
        if let Some(lease) = lease {
            builder = builder.lease(time(lease)?);
        }
        if let Some(spin) = spin {
            builder = builder.spin(time(spin)?);
        }
        if let Some(most) = max_clients {
            builder = builder.max_clients(most);
        }
        if let Some(key) = read_only_key {
            builder = builder.read_only_key(key_of(key).or_raise(py)?);
        }
        builder = builder.rdma(match rdma {
            "off" => RdmaChoice::Off,
            "auto" => RdmaChoice::Auto,
            device => RdmaChoice::Device(device.to_owned()),
        });
        let bad = |what| farcell::Error::BadSetting { what };
        builder = builder.tls(tls.parse::<Tls>().map_err(bad).or_raise(py)?);
        if clear_rdma {
            builder = builder.clear_rdma();
        }
        if let Some(addr) = metrics {
            builder = builder.metrics(addr);
        }
        if cpu_domain {
            builder = builder.cpu_domain();
        }
        let native = py.detach(|| builder.start()).or_raise(py)?;
        Ok(Server {
            address: native.address(),
            listening: native.local_addrs().iter().map(ToString::to_string).collect(),
            metrics: native.metrics_addrs().iter().map(ToString::to_string).collect(),
            native: Mutex::new(Some(ManuallyDrop::new(native))),
            born: fork::generation(),
        })
    }

    /// The address to give to clients.
    #[getter]
    fn address(&self) -> &str {
        &self.address
    }

    /// Every address that it listens on.
    #[getter]
    fn listening(&self) -> Vec<String> {
        self.listening.clone()
    }

    /// Every address on which it serves metrics.
    #[getter]
    fn metrics_listening(&self) -> Vec<String> {
        self.metrics.clone()
    }

    /// Whether it runs, in this process.
    #[getter]
    fn is_running(&self) -> bool {
        lock(&self.native).is_some() && fork::generation() == self.born
    }

    /// How many sessions live.
    fn sessions(&self) -> usize {
        let native = lock(&self.native);
        native.as_ref().filter(|_| fork::generation() == self.born).map_or(0, |s| s.sessions())
    }

    /// How many waits are parked.
    fn parked_waits(&self) -> usize {
        let native = lock(&self.native);
        native.as_ref().filter(|_| fork::generation() == self.born).map_or(0, |s| s.parked_waits())
    }

    /// Tells the clients that it is going away, and ends it.
    fn stop(&self, py: Python<'_>) {
        self.end(py);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        Python::attach(|py| self.end(py));
    }
}
