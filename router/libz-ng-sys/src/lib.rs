//! The names of `libz-ng-sys` that `flate2` uses, served by `libz-rs-sys` (pure Rust).
//!
//! pingora requests flate2's `zlib-ng` backend whatever features are chosen, and the real `libz-ng-sys` compiles C
//! with cmake. Not every build machine has cmake, so the workspace patches that crate with this one. Nothing else
//! is different: the calls below are forwarded as they are.
//!
//! The only mismatch is the stream struct: flate2 fills `zalloc` and `zfree` with plain function pointers where
//! `libz-rs-sys` declares `Option`s of them. Rust guarantees that an `Option` of a function pointer has the
//! pointer's size and representation, so the layouts are the same. The assertions below check the sizes and the
//! offsets at compile time.
#![allow(
    unsafe_code,
    non_snake_case,
    non_camel_case_types,
    missing_docs,
    reason = "the names and the C interface of zlib-ng"
)]
#![allow(clippy::missing_safety_doc, reason = "every function has the safety contract of its zlib namesake")]

use core::ffi::{c_char, c_int, c_void};
use core::mem::{offset_of, size_of};

use libz_rs_sys::z_stream as inner_stream;
pub use libz_rs_sys::{
    Bytef, Z_BLOCK, Z_BUF_ERROR, Z_DATA_ERROR, Z_DEFAULT_STRATEGY, Z_DEFLATED, Z_FINISH, Z_FULL_FLUSH,
    Z_MEM_ERROR, Z_NEED_DICT, Z_NO_FLUSH, Z_OK, Z_PARTIAL_FLUSH, Z_STREAM_END, Z_STREAM_ERROR, Z_SYNC_FLUSH,
    uInt, uLong, zlibVersion,
};

pub type alloc_func = extern "C" fn(*mut c_void, uInt, uInt) -> *mut c_void;
pub type free_func = extern "C" fn(*mut c_void, *mut c_void);

/// zlib's stream, field for field; see zlib.h.
#[repr(C)]
pub struct z_stream {
    pub next_in: *mut u8,
    pub avail_in: uInt,
    pub total_in: uLong,
    pub next_out: *mut u8,
    pub avail_out: uInt,
    pub total_out: uLong,
    pub msg: *mut c_char,
    pub state: *mut c_void,
    pub zalloc: alloc_func,
    pub zfree: free_func,
    pub opaque: *mut c_void,
    pub data_type: c_int,
    pub adler: uLong,
    pub reserved: uLong,
}

const _: () = {
    assert!(size_of::<z_stream>() == size_of::<inner_stream>());
    assert!(offset_of!(z_stream, next_out) == offset_of!(inner_stream, next_out));
    assert!(offset_of!(z_stream, msg) == offset_of!(inner_stream, msg));
    assert!(offset_of!(z_stream, state) == offset_of!(inner_stream, state));
    assert!(offset_of!(z_stream, zalloc) == offset_of!(inner_stream, zalloc));
    assert!(offset_of!(z_stream, zfree) == offset_of!(inner_stream, zfree));
    assert!(offset_of!(z_stream, opaque) == offset_of!(inner_stream, opaque));
    assert!(offset_of!(z_stream, adler) == offset_of!(inner_stream, adler));
};

macro_rules! forward {
    ($($name:ident($($arg:ident: $ty:ty),*);)*) => {$(
        pub unsafe extern "C" fn $name(stream: *mut z_stream, $($arg: $ty),*) -> c_int {
            // SAFETY: the caller keeps zlib's contract for `stream`, and both structs have one layout.
            unsafe { libz_rs_sys::$name(stream.cast(), $($arg),*) }
        }
    )*};
}

forward! {
    deflate(flush: c_int);
    deflateEnd();
    deflateReset();
    deflateParams(level: c_int, strategy: c_int);
    deflateSetDictionary(dictionary: *const Bytef, length: uInt);
    deflateInit2_(level: c_int, method: c_int, window_bits: c_int, mem_level: c_int, strategy: c_int,
        version: *const c_char, stream_size: c_int);
    inflate(flush: c_int);
    inflateEnd();
    inflateReset2(window_bits: c_int);
    inflateSetDictionary(dictionary: *const Bytef, length: uInt);
    inflateInit2_(window_bits: c_int, version: *const c_char, stream_size: c_int);
}
