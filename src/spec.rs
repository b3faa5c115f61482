//! What is asked for: the name and the shape of a region. Pure, no system call.

use std::ffi::{CStr, CString};
use std::fmt;
use std::num::NonZeroUsize;
use std::time::Duration;

use crate::error::{Error, Result};

/// File names are `vllm_ec_{engine_id}.mmap`, the scheme that the original class uses.
pub const NAME_PREFIX: &str = "vllm_ec_";
pub const NAME_SUFFIX: &str = ".mmap";
/// Linux limits one component of a path to 255 bytes (not characters), see `path_resolution(7)`.
const NAME_MAX: usize = 255;

/// No region may reach this many bytes (1 EiB): offsets from here on are used for lock bytes
/// ([`crate::lock`]), and `off_t` ends at 2^63.
pub const MAX_REGION_BYTES: u64 = 1 << 60;

/// An engine id that is known to be one component of a path: not empty, no `/`, no NUL,
/// not made of dots, and short enough to fit into a file name.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct EngineId(String);

impl EngineId {
    /// # Errors
    /// [`Error::InvalidId`] says what is wrong with it.
    pub fn new(id: &str) -> Result<Self> {
        let max = NAME_MAX - NAME_PREFIX.len() - NAME_SUFFIX.len();
        let reason = if id.is_empty() {
            "it is empty".to_owned()
        } else if id.contains('/') {
            "it holds a `/`".to_owned()
        } else if id.contains('\0') {
            "it holds a NUL".to_owned()
        } else if id.bytes().all(|byte| byte == b'.') {
            "it is made of dots".to_owned()
        } else if id.len() > max {
            format!("it takes {} bytes, at most {max} fit", id.len())
        } else {
            return Ok(Self(id.to_owned()));
        };
        Err(Error::InvalidId {
            // A name of megabytes in a message helps nobody.
            id: id.chars().take(64).collect(),
            reason,
        })
    }

    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The file's name in its directory.
    #[must_use]
    pub fn file_name(&self) -> String {
        format!("{NAME_PREFIX}{}{NAME_SUFFIX}", self.0)
    }

    pub(crate) fn file_name_c(&self) -> CString {
        // An id holds no NUL, so the conversion cannot fail.
        CString::new(self.file_name()).unwrap_or_default()
    }

    /// The id in a file name of the scheme, if it is one.
    #[must_use]
    pub fn from_file_name(name: &CStr) -> Option<Self> {
        let id = name
            .to_str()
            .ok()?
            .strip_prefix(NAME_PREFIX)?
            .strip_suffix(NAME_SUFFIX)?;
        Self::new(id).ok()
    }
}

/// `num_blocks` blocks of `block_size_bytes` each, one behind the other, no header, no padding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    num_blocks: usize,
    block_size_bytes: usize,
}

impl Geometry {
    /// # Errors
    /// [`Error::InvalidNumber`] for a zero, [`Error::TooLarge`] where the product is
    /// [`MAX_REGION_BYTES`] or more.
    pub fn new(num_blocks: u64, block_size_bytes: u64) -> Result<Self> {
        for (what, value) in [("num_blocks", num_blocks), ("block_size_bytes", block_size_bytes)] {
            if value == 0 {
                return Err(Error::InvalidNumber {
                    what,
                    value: value.to_string(),
                    reason: "it must be at least 1",
                });
            }
        }
        let too_large = Error::TooLarge {
            num_blocks,
            block_size_bytes,
            max_bytes: MAX_REGION_BYTES - 1,
        };
        match num_blocks.checked_mul(block_size_bytes) {
            Some(total) if total < MAX_REGION_BYTES => {}
            _ => return Err(too_large),
        }
        match (usize::try_from(num_blocks), usize::try_from(block_size_bytes)) {
            (Ok(num_blocks), Ok(block_size_bytes)) => Ok(Self {
                num_blocks,
                block_size_bytes,
            }),
            _ => Err(too_large),
        }
    }

    #[must_use]
    pub fn num_blocks(&self) -> usize {
        self.num_blocks
    }

    #[must_use]
    pub fn block_size_bytes(&self) -> usize {
        self.block_size_bytes
    }

    /// `num_blocks * block_size_bytes`; checked when the geometry was made.
    #[must_use]
    pub fn total_bytes(&self) -> usize {
        self.num_blocks * self.block_size_bytes
    }
}

impl fmt::Display for Geometry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} blocks x {} bytes ({} bytes)",
            self.num_blocks,
            self.block_size_bytes,
            self.total_bytes()
        )
    }
}

/// May this constructor make the region, join it, or both?
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Mode {
    #[default]
    CreateOrJoin,
    /// A live region under the id is an error.
    Create,
    /// Never makes a file: waits for one.
    Join,
}

impl std::str::FromStr for Mode {
    type Err = Error;
    fn from_str(word: &str) -> Result<Self> {
        match word {
            "create_or_join" => Ok(Self::CreateOrJoin),
            "create" => Ok(Self::Create),
            "join" => Ok(Self::Join),
            other => Err(Error::InvalidNumber {
                what: "mode",
                value: format!("{other:?}"),
                reason: "it must be \"create_or_join\", \"create\" or \"join\"",
            }),
        }
    }
}

/// Who maps the pages ahead of their first use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Populate {
    /// The creator prefaults for writing; a joiner does not.
    #[default]
    Create,
    /// As `Create`, and a joiner maps the existing pages ahead too.
    Join,
    /// Nobody: the bytes are reserved, the first touch of a page maps it.
    Never,
}

impl std::str::FromStr for Populate {
    type Err = Error;
    fn from_str(word: &str) -> Result<Self> {
        match word {
            "create" => Ok(Self::Create),
            "join" => Ok(Self::Join),
            "never" => Ok(Self::Never),
            other => Err(Error::InvalidNumber {
                what: "populate",
                value: format!("{other:?}"),
                reason: "it must be \"create\", \"join\" or \"never\"",
            }),
        }
    }
}

/// May the creator place the region in huge pages?
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum HugePages {
    /// Where they are to be had without waiting for long; never makes the region larger.
    #[default]
    Auto,
    /// Base pages only.
    Off,
    /// Every whole huge page of the region must be one, else the constructor fails.
    Require,
}

impl std::str::FromStr for HugePages {
    type Err = Error;
    fn from_str(word: &str) -> Result<Self> {
        match word {
            "auto" => Ok(Self::Auto),
            "off" => Ok(Self::Off),
            "require" => Ok(Self::Require),
            other => Err(Error::InvalidNumber {
                what: "huge_pages",
                value: format!("{other:?}"),
                reason: "it must be \"auto\", \"off\" or \"require\"",
            }),
        }
    }
}

/// On which NUMA nodes the creator places the pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Numa {
    /// As the kernel does: on the node of whoever touches a page first.
    #[default]
    Default,
    /// Page by page in turn, over all nodes that this process may use.
    Interleave,
    /// On this node while it has free memory, else on the nearest.
    Node(u32),
}

impl std::str::FromStr for Numa {
    type Err = Error;
    /// A word, or a node's number.
    fn from_str(word: &str) -> Result<Self> {
        match word {
            "default" => Ok(Self::Default),
            "interleave" => Ok(Self::Interleave),
            other => other.parse().map(Self::Node).map_err(|_| Error::InvalidNumber {
                what: "numa",
                value: format!("{other:?}"),
                reason: "it must be \"default\", \"interleave\" or the number of a node",
            }),
        }
    }
}

/// All that a constructor is asked for.
#[derive(Debug, Clone)]
pub struct Spec {
    pub id: EngineId,
    pub geometry: Geometry,
    /// The end of every wait.
    pub timeout: Duration,
    pub mode: Mode,
    pub populate: Populate,
    pub huge_pages: HugePages,
    pub numa: Numa,
    /// Threads that prepare a region; `None`: by its size and the cores of this process.
    pub threads: Option<NonZeroUsize>,
}

impl Spec {
    /// The defaults of the contract: create or join, the creator prefaults, waits end after 30 s.
    #[must_use]
    pub fn new(id: EngineId, geometry: Geometry) -> Self {
        Self {
            id,
            geometry,
            timeout: Duration::from_secs(30),
            mode: Mode::default(),
            populate: Populate::default(),
            huge_pages: HugePages::default(),
            numa: Numa::default(),
            threads: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn names_follow_the_scheme_of_the_original() {
        let id = EngineId::new("1796093057530130120_dp0").unwrap();
        assert_eq!(id.file_name(), "vllm_ec_1796093057530130120_dp0.mmap");
    }

    #[test]
    fn ids_that_are_no_component_of_a_path_are_refused() {
        let long = "x".repeat(243);
        let wide = "é".repeat(130);
        for id in ["", "a/b", "../x", "a\0b", ".", "..", "...", &long, &wide] {
            assert!(matches!(EngineId::new(id), Err(Error::InvalidId { .. })), "{id:?}");
        }
        assert!(EngineId::new(&"x".repeat(242)).is_ok());
        assert!(EngineId::new(".hidden").is_ok());
    }

    #[test]
    fn zero_and_overflow_are_refused() {
        for (blocks, size) in [(0, 1), (1, 0), (0, 0)] {
            assert!(matches!(Geometry::new(blocks, size), Err(Error::InvalidNumber { .. })));
        }
        for (blocks, size) in [(u64::MAX, 2), (1 << 60, 1), (1 << 30, 1 << 30), (u64::MAX, u64::MAX)] {
            assert!(matches!(Geometry::new(blocks, size), Err(Error::TooLarge { .. })));
        }
        assert!(Geometry::new((1 << 60) - 1, 1).is_ok());
    }

    proptest! {
        #[test]
        fn an_accepted_id_survives_the_file_name(id in "\\PC{0,300}") {
            if let Ok(accepted) = EngineId::new(&id) {
                let name = accepted.file_name_c();
                prop_assert!(name.to_bytes().len() <= NAME_MAX);
                prop_assert!(!name.to_bytes().contains(&b'/'));
                prop_assert_eq!(EngineId::from_file_name(&name), Some(accepted));
            }
        }

        #[test]
        fn total_is_the_product(blocks in 1u64.., size in 1u64..) {
            let exact = u128::from(blocks) * u128::from(size);
            match Geometry::new(blocks, size) {
                Ok(geometry) => prop_assert_eq!(geometry.total_bytes() as u128, exact),
                Err(_) => prop_assert!(exact >= u128::from(MAX_REGION_BYTES)),
            }
        }
    }
}
