//! A process of the original class: no lock, in-place create, size later, unlink by path.

use super::process::unlink;
use super::protocol::Setting;
use super::state::{Bytes, Ino, Open, PIECES, Pc, Process, State};

const NAME: u8 = 0;

/// Can it fail here? A joiner's patience with the size ends after 30 s; a creator may find no space. Neither
/// takes anything back.
pub fn can_fail(state: &State, me: usize) -> bool {
    matches!(state.processes[me].pc, Pc::OriginalPoll | Pc::OriginalPopulate)
}

/// Does it wait for a size that nobody will give?
pub fn waits_in_vain(state: &State, me: usize) -> bool {
    let process = &state.processes[me];
    let Some(file) = process.file else { return false };
    process.pc == Pc::OriginalPoll
        && !state.inodes[usize::from(file.ino)].is_sized
        && !state
            .processes
            .iter()
            .any(|other| other.pc == Pc::OriginalResize && other.writes(file.ino))
}

pub fn go(setting: &Setting, state: &mut State, me: usize) {
    let name = state.names[usize::from(NAME)];
    let file = state.processes[me].file.map(|open| open.ino);
    match (state.processes[me].pc, file) {
        (Pc::OriginalCreate, _) => {
            if name.is_none() {
                let ino = state.make_inode(NAME);
                state.names[usize::from(NAME)] = Some(ino);
                state.processes[me].file = Some(Open::bare(ino));
                state.processes[me].is_creator = true;
                state.processes[me].pc = Pc::OriginalResize;
            } else {
                state.processes[me].pc = Pc::OriginalOpen;
            }
        }
        (Pc::OriginalOpen, _) => match name {
            Some(ino) => {
                if !state.has_living_holder(ino, None) {
                    state.inode(ino).adopted = true;
                }
                state.processes[me].file = Some(Open::bare(ino));
                state.processes[me].pc = Pc::OriginalPoll;
            }
            None => state.processes[me] = Process::GONE, // FileNotFoundError
        },
        (Pc::OriginalResize, Some(ino)) => {
            state.inode(ino).is_sized = true;
            state.processes[me].pc = Pc::OriginalMap;
        }
        (Pc::OriginalPoll, Some(ino)) => {
            if state.inode(ino).is_sized {
                state.processes[me].pc = Pc::OriginalMap;
            }
        }
        (Pc::OriginalMap, Some(ino)) => {
            state.processes[me].is_mapped = true;
            if state.processes[me].is_creator {
                state.processes[me].pc = Pc::OriginalPopulate;
            } else {
                opened(state, me, ino);
            }
        }
        (Pc::OriginalPopulate, Some(ino)) => {
            if state.inode(ino).reserved == PIECES {
                opened(state, me, ino);
            } else if state.has_room(setting, 1) {
                state.inode(ino).reserved += 1;
            } else {
                fail(state, me);
            }
        }
        (Pc::OriginalOpened, _) => {
            state.processes[me].pc = if state.processes[me].is_creator {
                Pc::OriginalUnlink
            } else {
                Pc::OriginalClose
            };
        }
        (Pc::OriginalUnlink, file) => {
            unlink(setting, state, me, NAME, file);
            state.processes[me].pc = Pc::OriginalClose;
        }
        (Pc::OriginalClose, _) => fail(state, me),
        _ => unreachable!("not a step of the original"),
    }
    state.collect();
}

/// Lets go of everything and leaves the name: its destructor does not unlink.
pub fn fail(state: &mut State, me: usize) {
    if let Some(file) = state.processes[me].file {
        state.inode(file.ino).excused = true;
    }
    state.processes[me] = Process::GONE;
    state.collect();
}

fn opened(state: &mut State, me: usize, ino: Ino) {
    let is_preparing = state.is_preparing(ino);
    let inode = state.inode(ino);
    if inode.bytes == Bytes::Zero {
        inode.bytes = Bytes::Written;
    }
    // A file of its own kind is reserved by nobody: that is what it was like before.
    if is_preparing && inode.reserved < PIECES {
        state.seen.original_unreserved = true;
    }
    state.processes[me].pc = Pc::OriginalOpened;
}
