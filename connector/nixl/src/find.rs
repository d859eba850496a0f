//! The search for the library: the file that the caller names, or the paths of the dynamic linker and then the folders
//! of `pip install nixl`.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::api::Library;
use crate::capi::Capi;

/// Environment variable that names the library's file.
pub const VARIABLE: &str = "BATON_NIXL_LIBRARY";

/// Names for the dynamic linker: with a version, which NIXL may add, and without one, as it is today.
const NAMES: [&str; 2] = ["libnixl_capi.so.0", "libnixl_capi.so"];

/// Maximum number of files to try.
const TRIED_MAX: usize = 64;

/// Why no library could be opened.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no NIXL library: {0}")]
pub struct LibraryNotFound(pub Box<str>);

/// Finds and opens the library: the file `named` if given, otherwise the first that is found. The library stays open
/// for the life of the process, because its threads cannot be unloaded.
///
/// # Errors
/// [`LibraryNotFound`] contains the tried files.
pub fn library(named: Option<&Path>) -> Result<Arc<dyn Library>, LibraryNotFound> {
    let open = |path: &Path| Capi::open(path).map(|library| Arc::new(library) as Arc<dyn Library>);
    if let Some(path) = named {
        return open(path).map_err(|error| LibraryNotFound(error.0));
    }
    let mut tried = Vec::new();
    for path in NAMES.map(PathBuf::from).into_iter().chain(wheel_libraries(&search_roots())).take(TRIED_MAX) {
        match open(&path) {
            Ok(library) => return Ok(library),
            Err(error) => tried.push(error.0),
        }
    }
    Err(LibraryNotFound(tried.join("; ").into()))
}

/// Folders that may contain `lib/python3.X/…`.
fn search_roots() -> Vec<PathBuf> {
    let user = std::env::var_os("HOME").map(|home| Path::new(&home).join(".local"));
    let virtual_env = std::env::var_os("VIRTUAL_ENV").map(PathBuf::from);
    virtual_env.into_iter().chain(user).chain(["/usr/local", "/usr"].map(PathBuf::from)).collect()
}

/// Libraries of installed wheels below `roots`: in `.nixl_cu12.mesonpy.libs` and similar folders.
fn wheel_libraries(roots: &[PathBuf]) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for root in roots {
        for python in entries(&root.join("lib"), |name| name.starts_with("python3")) {
            for packages in ["site-packages", "dist-packages"] {
                let wheel = |name: &str| name.starts_with(".nixl") && name.ends_with(".mesonpy.libs");
                let libraries = entries(&python.join(packages), wheel);
                found.extend(libraries.into_iter().map(|folder| folder.join(NAMES[1])));
            }
        }
    }
    found
}

/// The folder's entries with a matching name, in order.
fn entries(folder: &Path, name: impl Fn(&str) -> bool) -> Vec<PathBuf> {
    let found = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut found: Vec<_> =
        found.filter(|entry| name(&entry.file_name().to_string_lossy())).map(|entry| entry.path()).collect();
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_explicit_path_that_is_no_library_has_no_fallback() {
        let missing = library(Some(Path::new("/nowhere/libnixl_capi.so"))).expect_err("there is none");
        assert!(missing.to_string().contains("/nowhere/libnixl_capi.so"), "{missing}");
        let text = library(Some(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"))));
        assert!(text.is_err(), "a file that is not a library");
    }

    #[test]
    fn a_library_that_is_not_nixl_is_refused_by_what_it_lacks() {
        let error = library(Some(Path::new("libc.so.6"))).expect_err("the C library");
        assert!(error.to_string().contains("nixl_capi_"), "{error}");
    }

    #[test]
    fn wheels_are_found_below_a_python_folder() {
        let here = std::env::temp_dir().join(format!("baton-nixl-find-{}", std::process::id()));
        let wheel = here.join("lib/python3.11/site-packages/.nixl_cu12.mesonpy.libs");
        fs::create_dir_all(&wheel).expect("a folder");
        fs::create_dir_all(here.join("lib/python3.11/site-packages/numpy.libs")).expect("a folder");
        let found = wheel_libraries(std::slice::from_ref(&here));
        fs::remove_dir_all(&here).expect("it was made here");
        assert_eq!(found, [wheel.join("libnixl_capi.so")]);
    }
}
