//! Where a CUDA runtime library may be, best first. Reads names only; loading is [`crate::cuda`]'s.

use std::fs;
use std::path::{Path, PathBuf};

/// Names that loaders know, newest first. CUDA 11 put its minor version into the name.
pub const VERSIONED_NAMES: [&str; 4] = [
    "libcudart.so.13",
    "libcudart.so.12",
    "libcudart.so.11.0",
    "libcudart.so.11",
];

/// The libraries of torch that call the runtime: what they are bound to is torch's copy.
const TORCH_LIBRARIES: [&str; 4] = ["libc10_cuda.so", "libtorch_cuda.so", "libc10_hip.so", "libtorch_hip.so"];

/// Files that this process has mapped, each once, in the order of /proc/self/maps.
fn mapped_files(maps: &str) -> Vec<&Path> {
    let mut files: Vec<&Path> = Vec::new();
    for line in maps.lines() {
        // address perms offset dev inode path, where the path may hold blanks and a mark "(deleted)".
        let Some(start) = line.find('/') else { continue };
        let path = Path::new(line.get(start..).unwrap_or_default().trim_end_matches(" (deleted)"));
        if files.last() != Some(&path) && !files.contains(&path) {
            files.push(path);
        }
    }
    files
}

fn file_name(path: &Path) -> &str {
    path.file_name().and_then(|name| name.to_str()).unwrap_or_default()
}

/// Is it a copy of the runtime? Wheels put a hash into the name: `libcudart-1a2b3c.so.12`.
fn is_runtime(path: &Path) -> bool {
    file_name(path)
        .strip_prefix("libcudart")
        .and_then(|rest| rest.strip_prefix('.').map(|_| rest).or_else(|| rest.strip_prefix('-')))
        .is_some_and(|rest| rest.contains("so"))
}

/// Torch's libraries among the mapped files.
#[must_use]
pub fn loaded_torch(maps: &str) -> Vec<PathBuf> {
    let files = mapped_files(maps);
    TORCH_LIBRARIES
        .iter()
        .flat_map(|wanted| files.iter().filter(move |path| file_name(path) == *wanted))
        .map(|path| path.to_path_buf())
        .collect()
}

/// Copies of the runtime among the mapped files.
#[must_use]
pub fn loaded_runtimes(maps: &str) -> Vec<PathBuf> {
    mapped_files(maps)
        .into_iter()
        .filter(|path| is_runtime(path))
        .map(Path::to_path_buf)
        .collect()
}

/// Copies that pip's packages brought: `nvidia/*/lib/libcudart.so.*` under each root, highest version first.
#[must_use]
pub fn in_packages(roots: &[PathBuf]) -> Vec<PathBuf> {
    let list = |folder: &Path| -> Vec<PathBuf> {
        fs::read_dir(folder).map_or_else(
            |_| Vec::new(),
            |entries| entries.flatten().map(|entry| entry.path()).collect(),
        )
    };
    let mut found: Vec<(u32, PathBuf)> = roots
        .iter()
        .flat_map(|root| list(&root.join("nvidia")))
        .flat_map(|package| list(&package.join("lib")))
        .filter(|path| is_runtime(path))
        .map(|path| (major_version(&path), path))
        .collect();
    // Stable: among equals the order of the roots counts.
    found.sort_by_key(|&(major, _)| std::cmp::Reverse(major));
    found.into_iter().map(|(_, path)| path).collect()
}

/// The file that the loader would open for `path`, if it is there and no whole library: the loader maps what
/// the program headers say, and touching behind the end of a truncated file is SIGBUS. A bare name is looked
/// up along `LD_LIBRARY_PATH`, where half-copied files are most likely.
#[must_use]
pub fn broken_file(path: &Path) -> Option<PathBuf> {
    let candidates: Vec<PathBuf> = if path.components().count() > 1 {
        vec![path.to_owned()]
    } else {
        let folders = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
        std::env::split_paths(&folders)
            .map(|folder| folder.join(path))
            .collect()
    };
    // The loader goes on to the next folder where a file is not there or is for another machine.
    candidates
        .into_iter()
        .find(|file| file.exists() && !is_whole_library(file))
}

/// Does every loadable segment lie within the file? Anything but a 64-bit ELF file is left to the loader,
/// which says what is wrong with it.
fn is_whole_library(path: &Path) -> bool {
    use std::os::unix::fs::FileExt;

    let Ok(meta) = fs::metadata(path) else { return true };
    if !meta.is_file() {
        return false; // opening a FIFO would wait for ever
    }
    let Ok(file) = fs::File::open(path) else { return true };
    // Elf64_Ehdr: e_phoff at 32, e_phentsize at 54, e_phnum at 56; Elf64_Phdr: p_type at 0, p_offset at 8,
    // p_filesz at 32; see elf(5). The machine's own byte order: another one is not loaded anyhow.
    let mut header = [0u8; 64];
    if file.read_exact_at(&mut header, 0).is_err() || !header.starts_with(b"\x7fELF\x02") {
        return true;
    }
    let number = |bytes: &[u8], at: usize| -> u64 {
        let mut value = [0u8; 8];
        if let Some(found) = bytes.get(at..at + 8) {
            value.copy_from_slice(found);
        }
        u64::from_ne_bytes(value)
    };
    let half = |at: usize| number(&header, at) & 0xffff;
    let (offset, size, count) = (number(&header, 32), half(54), half(56));
    (0..count).all(|index| {
        let mut program_header = [0u8; 56];
        let at = offset.saturating_add(index * size);
        if file.read_exact_at(&mut program_header, at).is_err() {
            return false;
        }
        let is_loadable = number(&program_header, 0) & 0xffff_ffff == 1;
        let end = number(&program_header, 8).saturating_add(number(&program_header, 32));
        !is_loadable || end <= meta.len()
    })
}

/// `libcudart.so.13` is 13; 0 where the name has no version.
fn major_version(path: &Path) -> u32 {
    file_name(path)
        .rsplit_once(".so.")
        .and_then(|(_, version)| version.split('.').next()?.parse().ok())
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "\
7f0000000000-7f0000001000 r--p 00000000 fe:00 11 /usr/lib/libc.so.6
7f0000001000-7f0000002000 r--p 00000000 fe:00 12 /opt/other tool/libcudart.so.12
7f0000002000-7f0000003000 r-xp 00001000 fe:00 12 /opt/other tool/libcudart.so.12
7f0000003000-7f0000004000 r--p 00000000 fe:00 13 /venv/torch/lib/libtorch_cuda.so
7f0000004000-7f0000005000 r--p 00000000 fe:00 14 /venv/torch/lib/libc10_cuda.so
7f0000005000-7f0000006000 r--p 00000000 fe:00 15 /venv/torch/lib/libcudart-3ab2c1d4.so.13 (deleted)
7f0000006000-7f0000007000 r--p 00000000 fe:00 16 /venv/libcudart_static.so
7f0000007000-7f0000008000 rw-p 00000000 00:00 0
7ffc00000000-7ffc00001000 rw-p 00000000 00:00 0 [stack]
";

    #[test]
    fn copies_are_found_in_the_maps_whatever_their_name() {
        assert_eq!(
            loaded_runtimes(MAPS),
            [
                Path::new("/opt/other tool/libcudart.so.12"),
                Path::new("/venv/torch/lib/libcudart-3ab2c1d4.so.13"),
            ]
        );
        assert_eq!(
            loaded_torch(MAPS),
            [
                Path::new("/venv/torch/lib/libc10_cuda.so"),
                Path::new("/venv/torch/lib/libtorch_cuda.so"),
            ]
        );
        assert!(loaded_runtimes("").is_empty());
    }

    #[test]
    fn a_library_that_was_cut_off_is_broken_and_a_whole_one_is_not() {
        let whole = std::env::current_exe().unwrap();
        assert_eq!(broken_file(&whole), None);
        let folder = tempfile::tempdir().unwrap();
        let half = folder.path().join("libcudart.so.13");
        let bytes = fs::read(&whole).unwrap();
        for len in [100, 8192] {
            fs::write(&half, &bytes[..len]).unwrap();
            assert_eq!(broken_file(&half), Some(half.clone()), "{len} bytes");
        }
        fs::write(&half, b"this is no library").unwrap();
        assert_eq!(broken_file(&half), None); // the loader says so
        assert_eq!(broken_file(&folder.path().join("absent")), None);
        assert!(broken_file(folder.path()).is_some());
    }

    #[test]
    fn copies_of_packages_are_sorted_by_version() {
        let root = tempfile::tempdir().unwrap();
        let other = tempfile::tempdir().unwrap();
        let place = |root: &Path, folder: &str, name: &str| {
            let lib = root.join("nvidia").join(folder).join("lib");
            fs::create_dir_all(&lib).unwrap();
            fs::write(lib.join(name), b"").unwrap();
            lib.join(name)
        };
        let twelve = place(root.path(), "cuda_runtime", "libcudart.so.12");
        place(root.path(), "cuda_runtime", "libcublas.so.12");
        let thirteen = place(other.path(), "cu13", "libcudart.so.13");
        let roots = [
            root.path().to_owned(),
            other.path().to_owned(),
            PathBuf::from("/nowhere"),
        ];
        assert_eq!(in_packages(&roots), [thirteen, twelve]);
    }
}
