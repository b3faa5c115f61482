//! What a copy of many blocks will do, settled before the first byte moves: ids become runs of bytes. Pure.
//!
//! The blocks lie where their ids say; on the other side the caller's bytes lie packed, in the order of the
//! ids. Neighbours on both sides become one run, so that one long copy takes the place of many short ones.

use std::ops::Range;

use crate::error::{Error, Result};
use crate::spec::Geometry;

/// Which way the bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// From the caller's packed bytes to the blocks. An id may come only once.
    Scatter,
    /// From the blocks to the caller's packed bytes. Ids may repeat.
    Gather,
}

impl Direction {
    /// What callers know their side by.
    #[must_use]
    pub fn packed_name(self) -> &'static str {
        match self {
            Self::Scatter => "src",
            Self::Gather => "out",
        }
    }
}

/// Ids of blocks, in the order of the packed bytes.
#[derive(Debug, Clone, Copy)]
pub enum Ids<'a> {
    Listed(&'a [i64]),
    /// `first`, `first + step`, and so on, `count` of them.
    Stepped {
        first: i64,
        step: i64,
        count: usize,
    },
}

impl<'a> From<&'a [i64]> for Ids<'a> {
    fn from(ids: &'a [i64]) -> Self {
        Self::Listed(ids)
    }
}

impl<'a> From<&'a Vec<i64>> for Ids<'a> {
    fn from(ids: &'a Vec<i64>) -> Self {
        Self::Listed(ids)
    }
}

impl<'a, const N: usize> From<&'a [i64; N]> for Ids<'a> {
    fn from(ids: &'a [i64; N]) -> Self {
        Self::Listed(ids)
    }
}

impl From<Range<i64>> for Ids<'_> {
    fn from(ids: Range<i64>) -> Self {
        Self::Stepped {
            first: ids.start,
            step: 1,
            count: ids
                .end
                .checked_sub(ids.start)
                .map_or(0, |count| usize::try_from(count).unwrap_or(0)),
        }
    }
}

impl Ids<'_> {
    #[must_use]
    pub fn count(&self) -> usize {
        match *self {
            Self::Listed(ids) => ids.len(),
            Self::Stepped { count, .. } => count,
        }
    }

    /// Beyond 64 bits the value that comes out is wrong, but never the id of a block.
    fn at(first: i64, step: i64, position: usize) -> i128 {
        i128::from(first) + i128::from(step) * position as i128
    }

    /// The first id that is no block's.
    fn first_stranger(&self, num_blocks: usize) -> Option<(usize, i128)> {
        let is_block = |id: i128| (0..num_blocks as i128).contains(&id);
        match *self {
            Self::Listed(ids) => {
                let position = ids.iter().position(|&id| !is_block(i128::from(id)))?;
                Some((position, i128::from(*ids.get(position)?)))
            }
            Self::Stepped { first, step, count } => {
                let last = count.checked_sub(1)?;
                if !is_block(i128::from(first)) {
                    return Some((0, i128::from(first)));
                }
                if is_block(Self::at(first, step, last)) {
                    return None;
                }
                // They go one way, from inside to outside; the step is not 0.
                let inside = if step > 0 {
                    num_blocks as i128 - 1 - i128::from(first)
                } else {
                    i128::from(first)
                };
                let position = usize::try_from(inside / i128::from(step).abs() + 1).unwrap_or(last);
                Some((position, Self::at(first, step, position)))
            }
        }
    }

    /// The first id that comes a second time, with both positions. All are ids of blocks.
    fn first_duplicate(&self, num_blocks: usize) -> Option<Duplicate> {
        match *self {
            Self::Stepped { first, step: 0, count } if count > 1 => Some(Duplicate {
                id: first,
                first: 0,
                second: 1,
            }),
            Self::Stepped { .. } => None,
            // What ascends does not repeat; allocators often hand out ids so.
            Self::Listed(ids) if ids.is_sorted_by(|a, b| a < b) => None,
            Self::Listed(ids) => {
                let second = first_repeat(ids, num_blocks)?;
                let id = *ids.get(second)?;
                Some(Duplicate {
                    id,
                    first: ids.iter().position(|&other| other == id)?,
                    second,
                })
            }
        }
    }
}

struct Duplicate {
    id: i64,
    first: usize,
    second: usize,
}

/// Position of the first id that was there before.
fn first_repeat(ids: &[i64], num_blocks: usize) -> Option<usize> {
    // One bit for each block where those are few (1,000 ids took 1 us in a region of 512 Ki blocks), else a sorted copy (10 us).
    if num_blocks / 64 <= ids.len().saturating_mul(8) {
        let mut seen = vec![0_u64; num_blocks / 64 + 1];
        return ids.iter().position(|&id| {
            let (word, bit) = (id as usize / 64, 1_u64 << (id % 64));
            // Every id is a block's, so that the word is there.
            let Some(word) = seen.get_mut(word) else { return false };
            let was_seen = *word & bit != 0;
            *word |= bit;
            was_seen
        });
    }
    let mut sorted: Vec<(i64, usize)> = ids.iter().copied().zip(0..).collect();
    sorted.sort_unstable();
    sorted
        .windows(2)
        .filter_map(|pair| match *pair {
            [(id, _), (next_id, position)] if id == next_id => Some(position),
            _ => None,
        })
        .min()
}

/// Bytes that lie together on both sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// Where they lie in the region.
    pub region_offset: usize,
    /// Where they lie in the caller's bytes.
    pub packed_offset: usize,
    pub len_bytes: usize,
}

impl Run {
    fn packed_end(&self) -> usize {
        self.packed_offset + self.len_bytes
    }

    fn region_end(&self) -> usize {
        self.region_offset + self.len_bytes
    }

    /// What of it lies in the range of the caller's bytes.
    fn clipped(&self, packed: &Range<usize>) -> Self {
        let start = self.packed_offset.max(packed.start);
        let end = self.packed_end().min(packed.end);
        Self {
            region_offset: self.region_offset + (start - self.packed_offset),
            packed_offset: start,
            len_bytes: end.saturating_sub(start),
        }
    }
}

/// A copy of blocks whose ids were checked against one geometry.
#[derive(Debug, Clone)]
pub struct Plan {
    direction: Direction,
    geometry: Geometry,
    count: usize,
    len_bytes: usize,
    /// Sorted by `packed_offset`; without gap or overlap they cover `0..len_bytes` of the caller's bytes.
    runs: Vec<Run>,
}

impl Plan {
    /// `len_bytes` is what the caller's side holds: all blocks, or less where the last one is only partly meant.
    ///
    /// # Errors
    /// [`Error::BlockOutOfRange`], [`Error::DuplicateBlock`], [`Error::PartialBytes`].
    pub fn new(geometry: Geometry, direction: Direction, ids: Ids<'_>, len_bytes: Option<usize>) -> Result<Self> {
        let (num_blocks, block_bytes) = (geometry.num_blocks(), geometry.block_size_bytes());
        if let Some((position, id)) = ids.first_stranger(num_blocks) {
            return Err(Error::BlockOutOfRange {
                id: id.to_string(),
                position,
                num_blocks,
            });
        }
        if direction == Direction::Scatter
            && let Some(Duplicate { id, first, second }) = ids.first_duplicate(num_blocks)
        {
            return Err(Error::DuplicateBlock { id, first, second });
        }
        let count = ids.count();
        // A gather may repeat blocks until the bytes are more than a process can have.
        let whole = count.saturating_mul(block_bytes);
        let len_bytes = len_bytes.unwrap_or(whole);
        let is_in_last = len_bytes <= whole && (whole - len_bytes) < block_bytes;
        if !is_in_last || whole > isize::MAX as usize {
            return Err(Error::PartialBytes {
                len_bytes,
                count,
                block_size_bytes: block_bytes,
            });
        }
        let mut runs = Runs {
            block_bytes,
            left_bytes: len_bytes,
            runs: Vec::new(),
        };
        match ids {
            Ids::Listed(ids) => ids.iter().for_each(|&id| runs.push(id as usize)),
            // Neighbours already: no need to walk.
            Ids::Stepped { first, step: 1, count } => runs.push_many(first as usize, count),
            Ids::Stepped { first, step, count } => {
                (0..count).for_each(|position| runs.push(Ids::at(first, step, position) as usize));
            }
        }
        Ok(Self {
            direction,
            geometry,
            count,
            len_bytes,
            runs: runs.runs,
        })
    }

    #[must_use]
    pub fn direction(&self) -> Direction {
        self.direction
    }

    /// The shape of the region that it is for.
    #[must_use]
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Number of ids.
    #[must_use]
    pub fn count(&self) -> usize {
        self.count
    }

    /// Bytes that move, which is what the caller's side holds.
    #[must_use]
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    #[must_use]
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// The runs of a range of the caller's bytes, cut at its ends.
    pub fn within(&self, packed: Range<usize>) -> impl Iterator<Item = Run> + '_ {
        let from = self.runs.partition_point(|run| run.packed_end() <= packed.start);
        self.runs
            .get(from..)
            .unwrap_or_default()
            .iter()
            .take_while({
                let end = packed.end;
                move |run| run.packed_offset < end
            })
            .map(move |run| run.clipped(&packed))
            .filter(|run| run.len_bytes > 0)
    }

    /// Would it touch one of these bytes of the region?
    #[must_use]
    pub fn touches(&self, region: Range<usize>) -> bool {
        let meets = |run: &Run| run.region_offset < region.end && region.start < run.region_end();
        !region.is_empty() && self.runs.iter().any(meets)
    }
}

/// Runs in the making.
struct Runs {
    block_bytes: usize,
    left_bytes: usize,
    runs: Vec<Run>,
}

impl Runs {
    fn push(&mut self, id: usize) {
        self.push_many(id, 1);
    }

    /// `count` blocks from `id` on.
    fn push_many(&mut self, id: usize, count: usize) {
        let len_bytes = self.left_bytes.min(count * self.block_bytes);
        if len_bytes == 0 {
            return;
        }
        self.left_bytes -= len_bytes;
        let region_offset = id * self.block_bytes;
        let packed_offset = match self.runs.last_mut() {
            Some(last) if last.region_end() == region_offset => {
                last.len_bytes += len_bytes;
                return;
            }
            Some(last) => last.packed_end(),
            None => 0,
        };
        self.runs.push(Run {
            region_offset,
            packed_offset,
            len_bytes,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;

    fn geometry(blocks: u64, bytes: u64) -> Geometry {
        Geometry::new(blocks, bytes).unwrap()
    }

    fn plan<'a>(direction: Direction, ids: impl Into<Ids<'a>>, len_bytes: Option<usize>) -> Result<Plan> {
        Plan::new(geometry(10, 100), direction, ids.into(), len_bytes)
    }

    fn run(region_offset: usize, packed_offset: usize, len_bytes: usize) -> Run {
        Run {
            region_offset,
            packed_offset,
            len_bytes,
        }
    }

    #[test]
    fn neighbours_become_one_run_and_nothing_else_does() {
        let runs = plan(Direction::Gather, &[3, 4, 5, 5, 1, 0], None).unwrap().runs;
        assert_eq!(
            runs,
            [
                run(300, 0, 300),
                run(500, 300, 100),
                run(100, 400, 100),
                run(0, 500, 100)
            ]
        );
    }

    #[test]
    fn a_range_is_one_run() {
        let runs = plan(Direction::Scatter, 2..9, Some(650)).unwrap().runs;
        assert_eq!(runs, [run(200, 0, 650)]);
    }

    #[test]
    fn nothing_is_no_work() {
        for direction in [Direction::Scatter, Direction::Gather] {
            let plan = plan(direction, &[], None).unwrap();
            assert_eq!((plan.count(), plan.len_bytes(), plan.runs()), (0, 0, &[][..]));
        }
        assert!(plan(Direction::Gather, &[], Some(1)).is_err());
        let backwards = Range { start: 7, end: 3 };
        assert!(plan(Direction::Gather, backwards, None).unwrap().runs().is_empty());
    }

    #[test]
    fn only_the_last_block_may_be_partial() {
        for (len_bytes, is_fine) in [
            (100, false),
            (101, true),
            (199, true),
            (200, true),
            (201, false),
            (0, false),
        ] {
            let planned = plan(Direction::Scatter, &[7, 2], Some(len_bytes));
            assert_eq!(planned.is_ok(), is_fine, "{len_bytes}");
        }
        let planned = plan(Direction::Scatter, &[7, 2], Some(101)).unwrap();
        assert_eq!(planned.runs(), [run(700, 0, 100), run(200, 100, 1)]);
        // Zero bytes of a block are no block.
        assert!(plan(Direction::Gather, &[7], Some(0)).is_err());
    }

    #[test]
    fn the_first_stranger_is_named() {
        let refusal = |ids: Ids<'_>| plan(Direction::Gather, ids, None).unwrap_err().to_string();
        assert_eq!(
            refusal(Ids::Listed(&[3, 10, -1])),
            "block id out of range: 10 at position 1: the region has 10 blocks"
        );
        assert_eq!(
            refusal(Ids::Listed(&[3, -1, 10])),
            "block id out of range: -1 at position 1: the region has 10 blocks"
        );
        let stepped = |first, step, count| refusal(Ids::Stepped { first, step, count });
        assert!(stepped(4, 3, 9).contains("10 at position 2"));
        assert!(stepped(4, -3, 9).contains("-2 at position 2"));
        assert!(stepped(i64::MAX, 1, 2).contains("9223372036854775807 at position 0"));
        assert!(stepped(1, i64::MAX, 3).contains("9223372036854775808 at position 1"));
    }

    #[test]
    fn a_scatter_writes_each_block_once() {
        let refusal = |ids: Ids<'_>| plan(Direction::Scatter, ids, None).unwrap_err().to_string();
        assert_eq!(
            refusal(Ids::Listed(&[9, 4, 7, 4, 9])),
            "duplicate block id: 4 at positions 1 and 3"
        );
        let stepped = Ids::Stepped {
            first: 3,
            step: 0,
            count: 2,
        };
        assert_eq!(refusal(stepped), "duplicate block id: 3 at positions 0 and 1");
        assert!(plan(Direction::Gather, stepped, None).is_ok());
    }

    #[test]
    fn more_bytes_than_there_can_be_are_refused() {
        let ids = [0; 1 << 10];
        let planned = Plan::new(geometry(1, 1 << 59), Direction::Gather, Ids::Listed(&ids), None);
        assert!(matches!(planned, Err(Error::PartialBytes { .. })), "{planned:?}");
    }

    /// The packed bytes block by block, as a loop would copy them.
    fn by_hand(ids: &[i64], block_bytes: usize, len_bytes: usize) -> Vec<usize> {
        let all = ids
            .iter()
            .flat_map(|&id| (0..block_bytes).map(move |byte| id as usize * block_bytes + byte));
        all.take(len_bytes).collect()
    }

    fn unrolled(runs: impl Iterator<Item = Run>, mut next: usize) -> Vec<usize> {
        let mut bytes = Vec::new();
        for run in runs {
            assert_eq!(run.packed_offset, next, "the packed bytes have no gap and no overlap");
            next += run.len_bytes;
            bytes.extend(run.region_offset..run.region_end());
        }
        bytes
    }

    proptest! {
        #[test]
        fn runs_say_what_a_loop_would_do(
            num_blocks in 1usize..40,
            block_bytes in 1usize..9,
            picks in proptest::collection::vec(0usize..1000, 0..60),
            cut in 0usize..9,
        ) {
            let ids: Vec<i64> = picks.iter().map(|pick| (pick % num_blocks) as i64).collect();
            let len_bytes = (ids.len() * block_bytes).saturating_sub(cut % block_bytes);
            let geometry = geometry(num_blocks as u64, block_bytes as u64);
            let planned = Plan::new(geometry, Direction::Gather, Ids::Listed(&ids), Some(len_bytes)).unwrap();
            prop_assert_eq!(unrolled(planned.runs().iter().copied(), 0), by_hand(&ids, block_bytes, len_bytes));
            // Runs that could have been one are one.
            prop_assert!(planned.runs().windows(2).all(|pair| pair[0].region_end() != pair[1].region_offset));
        }

        #[test]
        fn pieces_join_to_the_whole(
            picks in proptest::collection::vec(0i64..20, 0..60),
            cuts in proptest::collection::vec(0usize..500, 0..6),
        ) {
            let planned = Plan::new(geometry(20, 7), Direction::Gather, Ids::Listed(&picks), None).unwrap();
            let mut ends: Vec<usize> = cuts.iter().map(|cut| (*cut).min(planned.len_bytes())).collect();
            ends.extend([0, planned.len_bytes()]);
            ends.sort_unstable();
            let pieces = ends.windows(2).flat_map(|pair| planned.within(pair[0]..pair[1]));
            prop_assert_eq!(unrolled(pieces, 0), by_hand(&picks, 7, planned.len_bytes()));
        }

        #[test]
        fn a_duplicate_is_found_wherever_it_is(
            ids in proptest::collection::vec(0i64..50, 0..50),
            num_blocks in prop_oneof![Just(50u64), Just(1 << 20)],
        ) {
            let planned = Plan::new(geometry(num_blocks, 1), Direction::Scatter, Ids::Listed(&ids), None);
            let mut seen = HashSet::new();
            match ids.iter().position(|id| !seen.insert(*id)) {
                None => prop_assert!(planned.is_ok()),
                Some(position) => {
                    let Err(Error::DuplicateBlock { id, first, second }) = planned else { panic!("{planned:?}") };
                    prop_assert_eq!((id, second), (ids[position], position));
                    prop_assert_eq!(ids.iter().position(|other| *other == id), Some(first));
                }
            }
        }

        #[test]
        fn a_range_is_its_list(first in -3i64..25, step in -4i64..5, count in 0usize..12) {
            let ids: Vec<i64> = (0..count as i64).map(|position| first + step * position).collect();
            let geometry = geometry(20, 3);
            for direction in [Direction::Scatter, Direction::Gather] {
                let listed = Plan::new(geometry, direction, Ids::Listed(&ids), None);
                let stepped = Plan::new(geometry, direction, Ids::Stepped { first, step, count }, None);
                match (listed, stepped) {
                    (Ok(listed), Ok(stepped)) => prop_assert_eq!(listed.runs(), stepped.runs()),
                    (Err(listed), Err(stepped)) => prop_assert_eq!(listed.to_string(), stepped.to_string()),
                    (listed, stepped) => panic!("{listed:?} {stepped:?}"),
                }
            }
        }

        #[test]
        fn touching_is_sharing_a_byte(
            ids in proptest::collection::vec(0i64..10, 0..5), start in 0usize..40, len in 0usize..10,
        ) {
            let planned = Plan::new(geometry(10, 4), Direction::Gather, Ids::Listed(&ids), None).unwrap();
            let touched: HashSet<usize> = by_hand(&ids, 4, planned.len_bytes()).into_iter().collect();
            prop_assert_eq!(planned.touches(start..start + len), (start..start + len).any(|byte| touched.contains(&byte)));
        }
    }
}
