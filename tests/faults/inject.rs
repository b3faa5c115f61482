//! The preloaded library: built once, and told by a worker what shall fail.

#![allow(unsafe_code)] // calls functions of the preloaded library, which it looks up by name

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;

use nix::libc;

use crate::common::worker::{self, Worker};

/// The library, if this machine has a compiler for it.
pub fn shim() -> Option<PathBuf> {
    static SHIM: OnceLock<Option<PathBuf>> = OnceLock::new();
    SHIM.get_or_init(|| {
        let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
        // Test runs may overlap: nobody must find half a library.
        let unfinished = folder.join(format!("faults_shim_{}.so", std::process::id()));
        let library = folder.join("faults_shim.so");
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/faults_shim.c");
        let compiled = Command::new("cc")
            .args(["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o"])
            .arg(&unfinished)
            .args([source, "-ldl"])
            .status();
        match compiled {
            Err(error) => {
                eprintln!("skipped: no C compiler here: `cc`: {error}");
                None
            }
            Ok(status) => {
                assert!(status.success(), "`cc` refused {source}");
                fs::rename(unfinished, &library).unwrap();
                Some(library)
            }
        }
    })
    .clone()
}

fn function(name: &CStr) -> *mut c_void {
    // SAFETY: both arguments are what dlsym(3) takes.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    assert!(!found.is_null(), "{name:?}: the library is not preloaded");
    found
}

fn reset() {
    // SAFETY: the library defines it so.
    let reset: extern "C" fn() = unsafe { std::mem::transmute(function(c"faults_reset")) };
    reset();
}

fn arm(is_armed: bool) {
    // SAFETY: the library defines it so.
    let arm: extern "C" fn(c_int) = unsafe { std::mem::transmute(function(c"faults_arm")) };
    arm(c_int::from(is_armed));
}

/// `call/nth/once/errno`, or `for_ever`; errno 0 is a SIGKILL.
fn add(rule: &str) {
    let words: Vec<_> = rule.split('/').collect();
    let call = CString::new(words[0]).unwrap();
    // SAFETY: the library defines it so.
    let add: extern "C" fn(*const c_char, c_int, c_int, c_int) =
        unsafe { std::mem::transmute(function(c"faults_add")) };
    add(
        call.as_ptr(),
        words[1].parse().unwrap(),
        c_int::from(words[2] == "for_ever"),
        words[3].parse().unwrap(),
    );
}

fn calls() -> String {
    let mut text = vec![0u8; 8192];
    // SAFETY: the library defines it so.
    let calls: extern "C" fn(*mut c_char, usize) = unsafe { std::mem::transmute(function(c"faults_calls")) };
    calls(text.as_mut_ptr().cast(), text.len());
    CStr::from_bytes_until_nul(&text).unwrap().to_str().unwrap().to_owned()
}

/// Descriptors of this process, and mappings of files in /dev/shm.
fn held() -> (usize, usize) {
    let descriptors = fs::read_dir("/proc/self/fd").unwrap().count();
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    (
        descriptors,
        maps.lines().filter(|line| line.contains("/dev/shm/")).count(),
    )
}

/// A worker that also knows `faulty RULES COMMAND...`, `calls`, `mark` and `leaks`.
pub fn serve() {
    let mut marked = (0, 0);
    let mut last_calls = String::new();
    worker::run(move |worker: &mut Worker, words: &[&str]| match *words {
        ["faulty", rules, ref command @ ..] => {
            reset();
            rules
                .split(',')
                .filter(|rule| !rule.is_empty() && *rule != "-")
                .for_each(add);
            worker.around = Some(arm);
            let answer = worker.execute(command);
            worker.around = None;
            last_calls = calls();
            Some(answer)
        }
        ["calls"] => Some(format!("ok {last_calls}")),
        ["mark"] => {
            marked = held();
            Some("ok".into())
        }
        ["leaks"] => {
            let now = held();
            let is_leaking = now != marked;
            Some(if is_leaking {
                format!("err Leak 0 (descriptors, mappings): {marked:?} before, {now:?} after")
            } else {
                "ok".into()
            })
        }
        _ => None,
    });
}
