//! The table of functions that are symbols of libibverbs.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::fmt;
use std::sync::OnceLock;

use crate::types::{
    ibv_async_event, ibv_comp_channel, ibv_context, ibv_cq, ibv_device, ibv_device_attr,
    ibv_fork_status, ibv_gid, ibv_gid_entry, ibv_mr, ibv_pd, ibv_port_attr, ibv_qp, ibv_qp_attr,
    ibv_qp_init_attr, ibv_srq, ibv_srq_attr, ibv_srq_init_attr, ibv_wc_status,
};

/// The file that [`Library::load`] asks the dynamic loader for.
pub const LIBRARY_NAME: &str = "libibverbs.so.1";

/// Why there is no usable libibverbs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LoadError {
    /// There is no such file where the dynamic loader looks.
    NoLibrary {
        /// The file asked for.
        file: String,
        /// What the dynamic loader said.
        reason: String,
    },
    /// The dynamic loader could not open the file, did not accept it, or lacks
    /// another one that it needs.
    Unusable {
        /// The file asked for.
        file: String,
        /// What the dynamic loader said.
        reason: String,
    },
    /// The file is there but lacks a function that every version since
    /// `IBVERBS_1.1` has.
    NoSymbol {
        /// The file asked for.
        file: String,
        /// The function that is missing.
        symbol: &'static str,
    },
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LoadError::NoLibrary { file, reason } => {
                write!(f, "no {file} on this machine ({reason})")
            }
            LoadError::Unusable { file, reason } => {
                let files = reason.contains("Too many open files") || reason.contains("Error 24");
                let more = if files { ": raise the limit of open files (ulimit -n)" } else { "" };
                write!(f, "cannot load {file} ({reason}){more}")
            }
            LoadError::NoSymbol { file, symbol } => {
                write!(f, "{file} has no {symbol}: it is too old, or another library")
            }
        }
    }
}

impl std::error::Error for LoadError {}

macro_rules! functions {
    (
        required { $( $name:ident = $symbol:literal: fn($($arg:ty),* $(,)?) $(-> $ret:ty)?; )* }
        optional { $( $oname:ident = $osymbol:literal: fn($($oarg:ty),* $(,)?) $(-> $oret:ty)?; )* }
    ) => {
        /// The functions of libibverbs, one field a symbol. What only newer
        /// versions have is optional.
        ///
        /// The fields are public so that a test can put a library of its own
        /// together, see [`Library::from_functions`].
        #[derive(Clone, Copy)]
        pub struct Functions {
            $(
                #[doc = concat!("`", $symbol, "(3)`.")]
                pub $name: unsafe extern "C" fn($($arg),*) $(-> $ret)?,
            )*
            $(
                #[doc = concat!("`", $osymbol, "`, absent from older versions.")]
                pub $oname: Option<unsafe extern "C" fn($($oarg),*) $(-> $oret)?>,
            )*
        }

        impl Functions {
            /// # Safety
            /// The symbols of `library` must be those of libibverbs, with the
            /// C signatures given here.
            unsafe fn find(library: &libloading::Library, file: &str) -> Result<Self, LoadError> {
                Ok(Self {
                    $(
                        // SAFETY: the caller vouches for the signatures.
                        $name: *unsafe { library.get(concat!($symbol, "\0").as_bytes()) }
                            .map_err(|_| LoadError::NoSymbol {
                                file: file.to_owned(),
                                symbol: $symbol,
                            })?,
                    )*
                    $(
                        // SAFETY: as above.
                        $oname: unsafe { library.get(concat!($osymbol, "\0").as_bytes()) }
                            .ok()
                            .map(|symbol| *symbol),
                    )*
                })
            }
        }
    };
}

functions! {
    required {
        get_device_list = "ibv_get_device_list": fn(*mut c_int) -> *mut *mut ibv_device;
        free_device_list = "ibv_free_device_list": fn(*mut *mut ibv_device);
        open_device = "ibv_open_device": fn(*mut ibv_device) -> *mut ibv_context;
        close_device = "ibv_close_device": fn(*mut ibv_context) -> c_int;
        get_async_event = "ibv_get_async_event": fn(*mut ibv_context, *mut ibv_async_event) -> c_int;
        ack_async_event = "ibv_ack_async_event": fn(*mut ibv_async_event);
        query_device = "ibv_query_device": fn(*mut ibv_context, *mut ibv_device_attr) -> c_int;
        query_port = "ibv_query_port": fn(*mut ibv_context, u8, *mut ibv_port_attr) -> c_int;
        query_gid = "ibv_query_gid": fn(*mut ibv_context, u8, c_int, *mut ibv_gid) -> c_int;
        alloc_pd = "ibv_alloc_pd": fn(*mut ibv_context) -> *mut ibv_pd;
        dealloc_pd = "ibv_dealloc_pd": fn(*mut ibv_pd) -> c_int;
        reg_mr = "ibv_reg_mr": fn(*mut ibv_pd, *mut c_void, usize, c_int) -> *mut ibv_mr;
        dereg_mr = "ibv_dereg_mr": fn(*mut ibv_mr) -> c_int;
        create_comp_channel = "ibv_create_comp_channel": fn(*mut ibv_context) -> *mut ibv_comp_channel;
        destroy_comp_channel = "ibv_destroy_comp_channel": fn(*mut ibv_comp_channel) -> c_int;
        create_cq = "ibv_create_cq": fn(*mut ibv_context, c_int, *mut c_void, *mut ibv_comp_channel, c_int) -> *mut ibv_cq;
        destroy_cq = "ibv_destroy_cq": fn(*mut ibv_cq) -> c_int;
        get_cq_event = "ibv_get_cq_event": fn(*mut ibv_comp_channel, *mut *mut ibv_cq, *mut *mut c_void) -> c_int;
        ack_cq_events = "ibv_ack_cq_events": fn(*mut ibv_cq, c_uint);
        create_srq = "ibv_create_srq": fn(*mut ibv_pd, *mut ibv_srq_init_attr) -> *mut ibv_srq;
        modify_srq = "ibv_modify_srq": fn(*mut ibv_srq, *mut ibv_srq_attr, c_int) -> c_int;
        destroy_srq = "ibv_destroy_srq": fn(*mut ibv_srq) -> c_int;
        create_qp = "ibv_create_qp": fn(*mut ibv_pd, *mut ibv_qp_init_attr) -> *mut ibv_qp;
        modify_qp = "ibv_modify_qp": fn(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int;
        query_qp = "ibv_query_qp": fn(*mut ibv_qp, *mut ibv_qp_attr, c_int, *mut ibv_qp_init_attr) -> c_int;
        destroy_qp = "ibv_destroy_qp": fn(*mut ibv_qp) -> c_int;
        wc_status_str = "ibv_wc_status_str": fn(ibv_wc_status) -> *const c_char;
        fork_init = "ibv_fork_init": fn() -> c_int;
    }
    optional {
        is_fork_initialized = "ibv_is_fork_initialized": fn() -> ibv_fork_status;
        query_gid_ex = "_ibv_query_gid_ex": fn(*mut ibv_context, u32, u32, *mut ibv_gid_entry, u32, usize) -> c_int;
    }
}

/// libibverbs, loaded. It stays loaded until the process ends: the providers
/// that it loads in turn do not survive being unloaded.
pub struct Library {
    pub(crate) functions: Functions,
    /// Keeps the file mapped. `None` for a table made by hand.
    _file: Option<libloading::Library>,
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Library").finish_non_exhaustive()
    }
}

impl Library {
    /// Loads [`LIBRARY_NAME`] once per process; later calls answer the same.
    ///
    /// May block for as long as the dynamic loader reads the file.
    ///
    /// # Errors
    /// [`LoadError`], remembered too: a library that is installed later is
    /// found by the next process.
    pub fn load() -> Result<&'static Library, LoadError> {
        static LIBRARY: OnceLock<Result<Library, LoadError>> = OnceLock::new();
        LIBRARY.get_or_init(|| Library::open(LIBRARY_NAME)).as_ref().map_err(Clone::clone)
    }

    /// Loads a given file, afresh each time. For tests, and for those who
    /// keep the library in an unusual place.
    ///
    /// # Errors
    /// [`LoadError`].
    pub fn open(file: &str) -> Result<Library, LoadError> {
        // SAFETY: loading runs the initialisers of the file. Whoever can place
        // a file under this name into the loader's path can do as much to any
        // program; libibverbs' own initialisers are harmless.
        let loaded = unsafe { libloading::Library::new(file) }.map_err(|error| {
            // What the loader itself said stands behind the error.
            let said = std::error::Error::source(&error).map(ToString::to_string);
            let reason = said.unwrap_or_else(|| error.to_string());
            let file = file.to_owned();
            // glibc and musl say it with the system's own words.
            let absent = reason.contains("No such file") && reason.contains(&file);
            match absent {
                true => LoadError::NoLibrary { file, reason },
                false => LoadError::Unusable { file, reason },
            }
        })?;
        // SAFETY: the signatures are those of the C header; a library that has
        // all of these symbols is libibverbs.
        let functions = unsafe { Functions::find(&loaded, file)? };
        Ok(Library { functions, _file: Some(loaded) })
    }

    /// A library whose functions are given, for tests without a device.
    ///
    /// # Safety
    /// Each function must do what the C function of its name does, as far as
    /// the caller goes on to use it.
    #[must_use]
    pub unsafe fn from_functions(functions: Functions) -> Library {
        Library { functions, _file: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_absent_library_is_an_error_that_names_it() {
        let error = Library::open("libibverbs-that-is-not-there.so.1").unwrap_err();
        assert!(
            matches!(&error, LoadError::NoLibrary { file, .. } if file.contains("not-there")),
            "{error:?}"
        );
        assert!(error.to_string().starts_with("no libibverbs-that-is-not-there.so.1"));
    }

    #[test]
    fn a_library_that_is_there_and_does_not_load_is_not_called_absent() {
        let me = std::env::current_exe().unwrap().with_extension("d");
        std::fs::write(&me, "no library").unwrap();
        let error = Library::open(me.to_str().unwrap()).unwrap_err();
        assert!(matches!(&error, LoadError::Unusable { .. }), "{error:?}");
        let text = error.to_string();
        assert!(text.starts_with("cannot load /") && text.contains("too short"), "{text}");
    }

    #[test]
    fn another_library_is_an_error_that_names_the_symbol() {
        let error = Library::open("libc.so.6").unwrap_err();
        assert_eq!(
            error,
            LoadError::NoSymbol { file: "libc.so.6".to_owned(), symbol: "ibv_get_device_list" }
        );
    }
}
