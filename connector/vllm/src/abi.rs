//! The C functions of the library.
//!
//! Texts are UTF-8 and end with a zero byte. A returned text belongs to the caller, who gives it to
//! [`baton_vllm_free`]. A core is named by a number that is never used again, so a late call names no other core. A
//! panic becomes an error reply.

#![allow(
    unsafe_code,
    reason = "a C interface: texts of the caller by pointer; each block states what it relies on"
)]

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use serde_json::{Value, json};

use crate::assembly::Core;
use crate::signals::STOPPING;

/// The cores of this process.
static CORES: RwLock<BTreeMap<u64, Arc<Core>>> = RwLock::new(BTreeMap::new());

/// The number of the next core.
static NEXT: AtomicU64 = AtomicU64::new(1);

/// Starts a core: `{"core", "epoch", "http", "channel_port"}` or `{"error"}`.
///
/// # Safety
/// `config` is null or points to a text that ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn baton_vllm_start(config: *const c_char) -> *mut c_char {
    reply(|| {
        // SAFETY: the caller's promise.
        let config = unsafe { text(config) }?;
        let core = Core::start(config)?;
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let mut facts = core.facts();
        facts["core"] = Value::from(number);
        CORES.write().unwrap_or_else(PoisonError::into_inner).insert(number, core);
        Ok(facts)
    })
}

/// Runs one operation of a core; see `ops`.
///
/// # Safety
/// `op` is null or points to a text that ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn baton_vllm_call(core: u64, op: *const c_char) -> *mut c_char {
    reply(|| {
        // SAFETY: the caller's promise.
        let op = unsafe { text(op) }?;
        find(core).ok_or_else(|| format!("no core {core}"))?.call(op)
    })
}

/// The raised bits of a core: 1 ended leases, 2 aborts, 4 verdicts, 8 a reader waits for the pool's state, 16 stopping
/// (also of an unknown core). Does not wait.
#[unsafe(no_mangle)]
pub extern "C" fn baton_vllm_pending(core: u64) -> u32 {
    find(core).map_or(STOPPING, |core| core.signals().pending())
}

/// As [`baton_vllm_pending`], after a bit is raised that no wait has returned, or after `timeout_ms`.
#[unsafe(no_mangle)]
pub extern "C" fn baton_vllm_wait(core: u64, timeout_ms: u32) -> u32 {
    let timeout = Duration::from_millis(timeout_ms.into());
    find(core).map_or(STOPPING, |core| core.signals().wait(timeout))
}

/// Stops a core: every lease is released, and its threads end. Takes about a second at most.
#[unsafe(no_mangle)]
pub extern "C" fn baton_vllm_stop(core: u64) {
    let core = CORES.write().unwrap_or_else(PoisonError::into_inner).remove(&core);
    if let Some(core) = core {
        // A panic must not cross the boundary. The core is gone from the table in any case.
        let _ = catch_unwind(AssertUnwindSafe(|| core.stop()));
    }
}

/// Frees a text that this library returned.
///
/// # Safety
/// `text` is null or was returned by this library, and was not freed before.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn baton_vllm_free(text: *mut c_char) {
    if !text.is_null() {
        // SAFETY: the caller's promise: the pointer came from `CString::into_raw` and is freed once.
        drop(unsafe { CString::from_raw(text) });
    }
}

fn find(core: u64) -> Option<Arc<Core>> {
    CORES.read().unwrap_or_else(PoisonError::into_inner).get(&core).cloned()
}

/// The text of a caller.
///
/// # Safety
/// `pointer` is null or points to a text that ends with a zero byte, and that lives for `'a`.
unsafe fn text<'a>(pointer: *const c_char) -> Result<&'a str, String> {
    if pointer.is_null() {
        return Err("the text is null".into());
    }
    // SAFETY: the caller's promise, and the pointer is not null.
    let text = unsafe { CStr::from_ptr(pointer) };
    text.to_str().map_err(|error| format!("the text is not UTF-8: {error}"))
}

/// The reply of a function as JSON.
fn reply(act: impl FnOnce() -> Result<Value, String>) -> *mut c_char {
    let answer = catch_unwind(AssertUnwindSafe(act)).unwrap_or_else(|_| Err("the core panicked".into()));
    let value = answer.unwrap_or_else(|error| json!({"error": error}));
    // JSON escapes zero bytes, so there is none.
    CString::new(value.to_string()).map_or(ptr::null_mut(), CString::into_raw)
}

#[cfg(test)]
pub(crate) mod tests {
    //! The functions as the Python half calls them, without pointers.

    use super::*;

    fn take(reply: *mut c_char) -> Value {
        assert!(!reply.is_null());
        // SAFETY: a text of this library, which is not freed yet.
        let text = unsafe { CStr::from_ptr(reply) };
        let value = serde_json::from_slice(text.to_bytes()).expect("JSON");
        // SAFETY: a text of this library, freed once.
        unsafe { baton_vllm_free(reply) };
        value
    }

    pub(crate) fn start(config: &str) -> Value {
        let config = CString::new(config).expect("no zero byte");
        // SAFETY: a text that lives through the call.
        take(unsafe { baton_vllm_start(config.as_ptr()) })
    }

    pub(crate) fn call(core: u64, op: &str) -> Value {
        let op = CString::new(op).expect("no zero byte");
        // SAFETY: a text that lives through the call.
        take(unsafe { baton_vllm_call(core, op.as_ptr()) })
    }

    #[test]
    fn wrong_calls_get_an_error_and_change_nothing() {
        for config in ["", "[]", r#"{"htpp": 1}"#, r#"{"http": "192.0.2.1:1"}"#] {
            assert!(start(config)["error"].is_string(), "{config}");
        }
        // SAFETY: null is allowed.
        assert!(take(unsafe { baton_vllm_start(ptr::null()) })["error"].is_string());
        // SAFETY: null is allowed.
        unsafe { baton_vllm_free(ptr::null_mut()) };
        let invalid = CString::new(b"\xff".to_vec()).expect("no zero byte");
        // SAFETY: a text that lives through the call.
        assert!(take(unsafe { baton_vllm_call(0, invalid.as_ptr()) })["error"].is_string());
        assert_eq!(call(0, r#"{"op":"take"}"#)["error"], "no core 0");
        assert_eq!((baton_vllm_pending(0), baton_vllm_wait(0, 60_000)), (STOPPING, STOPPING));
        baton_vllm_stop(0);
    }

    #[test]
    fn a_stopped_core_is_unknown_and_its_number_is_not_used_again() {
        let first = start("{}");
        let number = first["core"].as_u64().expect("a number");
        assert_eq!(first["epoch"].as_str().map(str::len), Some(16));
        assert!(first["http"].as_str().is_some_and(|http| http.starts_with("127.0.0.1:")));
        assert!(call(number, "{}")["error"].is_string());
        assert_eq!(call(number, r#"{"op":"take"}"#)["ended"], json!([]));
        baton_vllm_stop(number);
        assert_eq!(baton_vllm_pending(number), STOPPING);
        let second = start("{}")["core"].as_u64().expect("a number");
        assert!(second > number);
        baton_vllm_stop(second);
    }
}
