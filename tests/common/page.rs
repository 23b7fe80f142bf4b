//! What a server tells Prometheus.

use farcell::Server;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// What a page says: the values by name and labels as they stand there, and the
/// types by name.
pub struct Page {
    pub values: BTreeMap<String, f64>,
    pub types: BTreeMap<String, String>,
    pub text: String,
}

/// Says this over a connection of its own; all that comes back.
pub fn talk(addr: SocketAddr, request: &str) -> String {
    let mut stream = TcpStream::connect(addr).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

/// What the server tells now.
pub fn scrape(server: &Server) -> Page {
    let addr = server.metrics_addrs()[0];
    let answer = talk(addr, "GET /metrics HTTP/1.1\r\nHost: farcell\r\n\r\n");
    let (head, text) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
    assert!(head.contains("Content-Type: text/plain; version=0.0.4"), "{head}");
    assert!(head.contains(&format!("Content-Length: {}", text.len())), "{head}");
    read(text)
}

/// Reads the text format, and is strict about it.
fn read(text: &str) -> Page {
    let (mut values, mut types) = (BTreeMap::new(), BTreeMap::new());
    let (mut helped, mut family) = (BTreeSet::new(), String::new());
    for line in text.lines() {
        if let Some(help) = line.strip_prefix("# HELP ") {
            let (name, words) = help.split_once(' ').unwrap();
            assert!(helped.insert(name.to_owned()), "two helps for {name}");
            assert!(words.ends_with('.'), "{line}");
            continue;
        }
        if let Some(kind) = line.strip_prefix("# TYPE ") {
            let (name, kind) = kind.split_once(' ').unwrap();
            assert!(helped.contains(name), "{name} has no help");
            assert!(types.insert(name.to_owned(), kind.to_owned()).is_none(), "{name} twice");
            assert_eq!(kind == "counter", name.ends_with("_total"), "{name}");
            family = name.to_owned();
            continue;
        }
        let (series, value) = line.rsplit_once(' ').unwrap();
        let name = series.split('{').next().unwrap();
        let own = name.strip_prefix(&*family).unwrap_or_else(|| panic!("{line} under {family}"));
        let parts = if types[&family] == "histogram" {
            own == "_bucket" || own == "_sum" || own == "_count"
        } else {
            own.is_empty()
        };
        assert!(parts, "{line} under {family}");
        let value: f64 = value.parse().unwrap();
        assert!(value >= 0.0 && value.is_finite(), "{line}");
        assert!(values.insert(series.to_owned(), value).is_none(), "{series} twice");
    }
    Page { values, types, text: text.to_owned() }
}

impl Page {
    /// Of a series that has to be there.
    pub fn value(&self, series: &str) -> f64 {
        *self.values.get(series).unwrap_or_else(|| panic!("no {series} in\n{}", self.text))
    }
}
