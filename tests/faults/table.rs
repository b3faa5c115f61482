//! The calls, the errnos that their manual pages name, and what comes of each.

use nix::libc::*;

/// What an operation comes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// A region, or a region closed: by another way, or at another try.
    Works,
    /// `Error::Os` with this errno.
    Os,
    /// `Error::NoSpace` with this errno.
    NoSpace,
    TimesOut,
}
use Outcome::{NoSpace, Os, TimesOut, Works};

impl Outcome {
    /// From a worker's answer.
    pub fn of(answer: &str, errno: i32) -> Result<Self, String> {
        let mut words = answer.split(' ');
        let outcome = match (words.next(), words.next()) {
            (Some("ok"), _) => return Ok(Works),
            (Some("err"), Some("Timeout")) => return Ok(TimesOut),
            (Some("err"), Some("Os")) => Os,
            (Some("err"), Some("NoSpace")) => NoSpace,
            _ => return Err(answer.to_owned()),
        };
        // Where a touch would have been a bus error, what is missing is room.
        let said = if outcome == NoSpace && errno == EFAULT {
            ENOSPC
        } else {
            errno
        };
        let is_same = words.next() == Some(said.to_string().as_str());
        if is_same {
            Ok(outcome)
        } else {
            Err(format!("errno {errno} became `{answer}`"))
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Times {
    Once,
    ForEver,
}

#[derive(Debug)]
pub struct Row {
    pub call: &'static str,
    pub errnos: &'static [i32],
    /// What may come of one failure. More than one where it depends on which of the calls it is.
    pub once: &'static [Outcome],
    pub for_ever: &'static [Outcome],
}

impl Row {
    pub fn allowed(&self, times: Times) -> &'static [Outcome] {
        match times {
            Times::Once => self.once,
            Times::ForEver => self.for_ever,
        }
    }

    /// A call that never gets through: where that begins says nothing new, and every case costs a deadline.
    pub fn is_the_same_wherever_it_begins(&self, errno: i32) -> bool {
        errno == EINTR || errno == EAGAIN || (errno == ENOENT && self.call == "openat(O_RDONLY)")
    }
}

const fn row(
    call: &'static str,
    errnos: &'static [i32],
    once: &'static [Outcome],
    for_ever: &'static [Outcome],
) -> Row {
    Row {
        call,
        errnos,
        once,
        for_ever,
    }
}

/// One interruption is no failure; one after the other ends at the latest with the caller's deadline.
const fn interrupted(call: &'static str) -> Row {
    row(call, &[EINTR], &[Works], &[Works, Os, TimesOut])
}

/// What a file of the kernel can be refused with; nothing depends on what it says. Not `EINTR`: the standard library
/// asks again for as long as it comes, and no open of such a file waits for anything.
const LOOKED_UP: &[i32] = &[EACCES, ELOOP, EMFILE, ENFILE, ENOENT, ENOMEM, ENOTDIR, EPERM];

/// Rows that some kernels have no use for: those without huge pages, and those that align every mapping.
pub const DEPENDS_ON_THE_KERNEL: &[&str] = &[
    "madvise(MADV_COLLAPSE)",
    "madvise(MADV_DONTDUMP)",
    "madvise(MADV_HUGEPAGE)",
    "madvise(MADV_NOHUGEPAGE)",
    "ioctl(PAGEMAP_SCAN)",
    "open(mountinfo)",
    "open(pagemap)",
    "open(smaps)",
    "mremap",
];

// An errno that a manual page names for uses of a call that are not ours is in its row all the same.
#[rustfmt::skip] // errnos in lines: in a column they take a thousand
pub const ROWS: &[Row] = &[
    row(
        "open",
        &[
            EACCES, EBADF, EBUSY, EDQUOT, EEXIST, EFAULT, EFBIG, EOVERFLOW, EINVAL, EISDIR, ELOOP, EMFILE,
            ENAMETOOLONG, ENFILE, ENODEV, ENXIO, ENOENT, ENOMEM, ENOSPC, ENOTDIR, EOPNOTSUPP, EPERM, EROFS, ETXTBSY,
            EWOULDBLOCK,
        ],
        // Works: a region that is closed opens the directory again to see whether it was the last.
        &[Os, Works],
        &[Os, Works],
    ),
    interrupted("open"),
    // The directory anew: for its lock, which everything needs, and to say that pages come back, which nothing needs.
    row(
        "openat(O_DIRECTORY)",
        &[
            EACCES, EBADF, EBUSY, EFAULT, EINVAL, ELOOP, EMFILE, ENFILE, ENODEV, ENOENT, ENOMEM, ENOTDIR, EPERM,
        ],
        &[Os, Works],
        &[Os, Works],
    ),
    interrupted("openat(O_DIRECTORY)"),
    row("openat(O_TMPFILE)", &[EOPNOTSUPP, EISDIR, ENOENT, EINVAL, ENOSYS], &[Works], &[Works]),
    row("openat(O_TMPFILE)", &[ENOSPC, EDQUOT], &[NoSpace], &[NoSpace]),
    row(
        "openat(O_TMPFILE)",
        &[
            EACCES, EBADF, EBUSY, EEXIST, EFAULT, EFBIG, EOVERFLOW, ELOOP, EMFILE, ENAMETOOLONG, ENFILE, ENODEV,
            ENXIO, ENOMEM, ENOTDIR, EPERM, EROFS, ETXTBSY, EWOULDBLOCK,
        ],
        &[Os],
        &[Os],
    ),
    interrupted("openat(O_TMPFILE)"),
    row("openat(O_CREAT)", &[ENOSPC, EDQUOT], &[NoSpace], &[NoSpace]),
    row(
        "openat(O_CREAT)",
        &[
            EACCES, EBADF, EBUSY, EEXIST, EFAULT, EFBIG, EINVAL, EISDIR, ELOOP, EMFILE, ENAMETOOLONG, ENFILE, ENODEV,
            ENXIO, ENOENT, ENOMEM, ENOTDIR, EOPNOTSUPP, EOVERFLOW, EPERM, EROFS, ETXTBSY, EWOULDBLOCK,
        ],
        &[Os],
        &[Os],
    ),
    interrupted("openat(O_CREAT)"),
    // A look at a name. The sweep passes over what it cannot look at.
    row("openat(O_RDONLY)", &[ENOENT], &[Works], &[Works, Os, TimesOut]),
    row(
        "openat(O_RDONLY)",
        &[
            EACCES, EBADF, EBUSY, EFAULT, EINVAL, ELOOP, EMFILE, ENAMETOOLONG, ENFILE, ENODEV, ENXIO, ENOMEM, ENOTDIR,
            EOVERFLOW, EPERM, EWOULDBLOCK,
        ],
        &[Os, Works],
        &[Os, Works],
    ),
    interrupted("openat(O_RDONLY)"),
    // A creator opens its file by its name; a joiner opens another's.
    row("openat(O_RDWR)", &[ENOENT, EWOULDBLOCK], &[Works, Os], &[TimesOut, Os]),
    row(
        "openat(O_RDWR)",
        &[
            EACCES, EBADF, EBUSY, EFAULT, EFBIG, EINVAL, EISDIR, ELOOP, EMFILE, ENAMETOOLONG, ENFILE, ENODEV, ENXIO,
            ENOMEM, ENOTDIR, EOVERFLOW, EPERM, EROFS, ETXTBSY,
        ],
        &[Os],
        &[Os],
    ),
    interrupted("openat(O_RDWR)"),
    // No /proc, or a sandbox: the file gets its name by renaming.
    row("linkat", &[ENOENT, EXDEV, EPERM, EACCES, EINVAL], &[Works], &[Works]),
    row("linkat", &[EEXIST], &[Works], &[TimesOut]),
    row("linkat", &[ENOSPC, EDQUOT], &[NoSpace], &[NoSpace]),
    row("linkat", &[EBADF, EFAULT, EIO, ELOOP, EMLINK, ENAMETOOLONG, ENOMEM, ENOTDIR, EROFS], &[Os], &[Os]),
    row("renameat2", &[EEXIST, ENOTEMPTY], &[Works, Os], &[TimesOut, Os]),
    row("renameat2", &[ENOSPC, EDQUOT], &[NoSpace], &[NoSpace]),
    row(
        "renameat2",
        &[
            EACCES, EBADF, EBUSY, EFAULT, EINVAL, EISDIR, ELOOP, EMLINK, ENAMETOOLONG, ENOENT, ENOMEM, ENOTDIR, EPERM,
            EROFS, EXDEV,
        ],
        &[Os],
        &[Os],
    ),
    // A dead file that cannot be removed: of the same id an error, of another id somebody else's matter.
    row("unlinkat", &[ENOENT], &[Works], &[Works, TimesOut]),
    row(
        "unlinkat",
        &[EACCES, EBADF, EBUSY, EFAULT, EINVAL, EIO, EISDIR, ELOOP, ENAMETOOLONG, ENOMEM, ENOTDIR, EPERM, EROFS],
        &[Works, Os],
        &[Works, Os],
    ),
    row("flock(LOCK_EX)", &[EWOULDBLOCK], &[Works], &[Works, TimesOut]),
    row("flock(LOCK_EX)", &[EBADF, EINVAL, ENOLCK], &[Os, Works], &[Os, Works]),
    interrupted("flock(LOCK_EX)"),
    row("flock(LOCK_SH)", &[EWOULDBLOCK], &[Works], &[Works, TimesOut]),
    row("flock(LOCK_SH)", &[EBADF, EINVAL, ENOLCK], &[Os], &[Os]),
    interrupted("flock(LOCK_SH)"),
    // The prober's own lock then keeps it from joining what it has looked at.
    row("flock(LOCK_UN)", &[EBADF, EINVAL, ENOLCK], &[Works], &[Works, TimesOut]),
    interrupted("flock(LOCK_UN)"),
    // Announcements: without them everybody does what they do with a file of the original class.
    // But a sign that was given must be taken back, or the error must say that it cannot be.
    row(
        "fcntl(F_OFD_SETLK)",
        &[EACCES, EAGAIN, EBADF, EDEADLK, EFAULT, EINVAL, ENOLCK],
        &[Works, Os],
        &[Works, Os],
    ),
    interrupted("fcntl(F_OFD_SETLK)"),
    row("fcntl(F_OFD_GETLK)", &[EACCES, EBADF, EFAULT, EINTR, EINVAL, ENOLCK], &[Works], &[Works]),
    row("fcntl(F_SETSIG)", &[EBADF, EINVAL, EPERM], &[Works], &[Works]),
    row("fcntl(F_GETLEASE)", &[EACCES, EBADF, EINTR, EINVAL, ENOLCK], &[Works], &[Works]),
    // EAGAIN says that somebody has the file open for writing.
    row("fcntl(F_SETLEASE)", &[EAGAIN], &[Works], &[Works, TimesOut]),
    row("fcntl(F_SETLEASE)", &[EACCES, EBADF, EINTR, EINVAL, ENOLCK, ENOMEM, EPERM], &[Works], &[Works]),
    // Once: there is room after all, and the constructor tries again.
    row("fallocate", &[ENOSPC, EDQUOT, EFBIG], &[NoSpace, Works], &[NoSpace]),
    row("fallocate", &[ENOMEM], &[Works], &[NoSpace]),
    row("fallocate", &[EOPNOTSUPP, ENOSYS], &[Works], &[Works]),
    row("fallocate", &[EBADF, EINVAL, EIO, ENODEV, EPERM, ESPIPE, ETXTBSY], &[Os], &[Os]),
    interrupted("fallocate"),
    row("posix_fallocate", &[ENOSPC, EFBIG], &[NoSpace, Works], &[NoSpace]),
    row("posix_fallocate", &[EBADF, EINVAL, ENODEV, EOPNOTSUPP, ESPIPE], &[Os], &[Os]),
    interrupted("posix_fallocate"),
    // Not EBADF: it says that the number is closed already, and nobody closes it then.
    row(
        "fstat",
        &[EACCES, EFAULT, EINVAL, ELOOP, ENAMETOOLONG, ENOENT, ENOMEM, ENOTDIR, EOVERFLOW],
        &[Os, Works],
        &[Os, Works],
    ),
    // For a moment nothing seems to be there: what follows finds that there is.
    row("fstatat", &[ENOENT], &[Works], &[Works, TimesOut]),
    row(
        "fstatat",
        &[EACCES, EBADF, EFAULT, EINVAL, ELOOP, ENAMETOOLONG, ENOMEM, ENOTDIR, EOVERFLOW],
        &[Os, Works],
        &[Os, Works],
    ),
    row(
        "statx",
        &[EACCES, EBADF, EFAULT, EINVAL, ELOOP, ENAMETOOLONG, ENOENT, ENOMEM, ENOTDIR],
        &[Os, Works],
        &[Os, Works],
    ),
    row(
        "fchmod",
        &[EACCES, EBADF, EFAULT, EINVAL, EIO, ELOOP, ENAMETOOLONG, ENOENT, ENOMEM, ENOTDIR, ENOTSUP, EPERM, EROFS],
        &[Os],
        &[Os],
    ),
    row(
        "ftruncate",
        &[
            EACCES, EBADF, EFAULT, EFBIG, EINVAL, EIO, EISDIR, ELOOP, ENAMETOOLONG, ENOENT, ENOTDIR, EPERM, EROFS,
            ETXTBSY,
        ],
        &[Os],
        &[Os],
    ),
    interrupted("ftruncate"),
    row(
        "mmap",
        &[
            EACCES, EAGAIN, EBADF, EEXIST, EINVAL, ENFILE, ENOEXEC, ENODEV, ENOMEM, EOVERFLOW, EPERM, ETXTBSY,
        ],
        // The second one is for an aligned address, and any will do.
        &[Os, Works],
        &[Os, Works],
    ),
    // The kernel keeps the mapping then, and nothing can be done about it.
    row("munmap", &[EINVAL], &[Works], &[Works]),
    // Once: as with `fallocate`. A fault that a full filesystem would cause counts as one.
    row("madvise(MADV_POPULATE_WRITE)", &[EINVAL], &[Works], &[Works]),
    row("madvise(MADV_POPULATE_WRITE)", &[EFAULT, ENOMEM], &[NoSpace, Works], &[NoSpace]),
    row("madvise(MADV_POPULATE_WRITE)", &[EAGAIN], &[Works], &[Works, Os, TimesOut]),
    row("madvise(MADV_POPULATE_WRITE)", &[EACCES, EBADF, EBUSY, EIO, EPERM, EHWPOISON], &[Os], &[Os]),
    interrupted("madvise(MADV_POPULATE_WRITE)"),
    row("madvise(MADV_POPULATE_READ)", &[EINVAL], &[Works], &[Works]),
    row("madvise(MADV_POPULATE_READ)", &[EAGAIN], &[Works], &[Works, Os, TimesOut]),
    row("madvise(MADV_POPULATE_READ)", &[EACCES, EBADF, EBUSY, EFAULT, EIO, ENOMEM, EPERM, EHWPOISON], &[Os], &[Os]),
    interrupted("madvise(MADV_POPULATE_READ)"),
    // Huge pages are a wish: without them there are base pages.
    row(
        "madvise(MADV_COLLAPSE)",
        &[EACCES, EAGAIN, EBADF, EBUSY, EFAULT, EINTR, EINVAL, EIO, ENOMEM, EPERM],
        &[Works],
        &[Works],
    ),
    row("madvise(MADV_HUGEPAGE)", &[EACCES, EAGAIN, EBADF, EINTR, EINVAL, EIO, ENOMEM, EPERM], &[Works], &[Works]),
    row("madvise(MADV_NOHUGEPAGE)", &[EACCES, EAGAIN, EBADF, EINTR, EINVAL, EIO, ENOMEM, EPERM], &[Works], &[Works]),
    // Without it a core file takes the region as well.
    row("madvise(MADV_DONTDUMP)", &[EACCES, EAGAIN, EBADF, EINTR, EINVAL, EIO, ENOMEM, EPERM], &[Works], &[Works]),
    row("fstatfs64", &[EACCES, EBADF, EFAULT, EINTR, EIO, ELOOP, ENOENT, ENOMEM, ENOSYS, EOVERFLOW], &[Works], &[Works]),
    row("ioctl(PAGEMAP_SCAN)", &[E2BIG, EBADF, EFAULT, EINTR, EINVAL, ENOMEM, ENOTTY], &[Works], &[Works]),
    row("open(mountinfo)", LOOKED_UP, &[Works], &[Works]),
    row("open(pagemap)", LOOKED_UP, &[Works], &[Works]),
    row("open(smaps)", LOOKED_UP, &[Works], &[Works]),
    row("open(cgroup)", LOOKED_UP, &[Works], &[Works]),
    row("mremap", &[EAGAIN, EFAULT, EINVAL, ENOMEM], &[Works], &[Works]),
    // So is the node, and a warning says that it was not granted; so are threads.
    row("mbind", &[EFAULT, EINVAL, EIO, ENOMEM, ENOSYS, EPERM], &[Works], &[Works]),
    row("get_mempolicy", &[EFAULT, EINVAL, ENOSYS, EPERM], &[Works], &[Works]),
    row("pthread_create", &[EAGAIN, EINVAL, EPERM], &[Works], &[Works]),
    row(
        "fstatvfs",
        &[EACCES, EBADF, EFAULT, EIO, ELOOP, ENAMETOOLONG, ENOENT, ENOMEM, ENOSYS, ENOTDIR, EOVERFLOW],
        &[Os],
        &[Os],
    ),
    interrupted("fstatvfs"),
    // What is not known limits nothing, and what cannot be listed is not swept.
    row("sysinfo", &[EFAULT], &[Works], &[Works]),
    row("getrlimit", &[EFAULT, EINVAL, EPERM], &[Works], &[Works]),
    row("opendir", &[EACCES, EBADF, EMFILE, ENFILE, ENOENT, ENOMEM, ENOTDIR], &[Works], &[Works]),
];
