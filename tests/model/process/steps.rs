//! The steps. Every arm is one system call, or several between which nothing that others do could make a
//! difference; where `src/` has a function for it, the comment above names it.

use super::super::state::{FIRST_TEMPORARY, Open, PIECES, Pc, Why};
use super::{Ours, unlink};

impl Ours<'_> {
    pub fn go(&mut self) {
        let setting = self.setting;
        let protocol = setting.protocol;
        match self.now().pc {
            Pc::Lock => {
                self.process().has_directory_lock = protocol.directory_lock;
                self.to(Pc::ProbeOpen);
            }

            // L2, `Locked::probe`. Its stat and its open are one here: where they differ it looks again.
            Pc::ProbeOpen => match self.name() {
                None => self.absent(),
                Some(ino) => {
                    let is_sized = self.state.inode(ino).is_sized;
                    let process = self.process();
                    process.found = Some(ino);
                    process.found_was_sized = is_sized;
                    process.pc = Pc::ProbeFlock;
                }
            },
            Pc::ProbeFlock => {
                let ino = self.found();
                let announced = self.announced_geometry(ino);
                self.process().found_geometry = announced;
                if announced.is_some() {
                    self.live();
                } else if self.state.is_flocked(ino, self.me) {
                    // A lock alone is no life.
                    if setting.leases && protocol.asks_for_writers && !self.state.has_writer(ino) {
                        self.locked();
                    } else {
                        self.live();
                    }
                } else {
                    self.process().found_is_locked = true;
                    self.to(Pc::ProbeLease);
                }
            }
            Pc::ProbeLease => {
                let ino = self.found();
                self.process().found_is_locked = false;
                if setting.leases && protocol.asks_for_writers && self.state.has_writer(ino) {
                    self.live();
                } else {
                    self.dead();
                }
            }

            // X6, `reap::remove_if_last`: without the lock.
            Pc::LastOutLook => match self.name() {
                Some(ino) if self.announced_geometry(ino).is_some() => self.is_out(),
                _ => self.to(Pc::Lock),
            },

            // R1 and R2, `reap::reclaim`.
            Pc::ReclaimCompare => {
                self.process().is_freeing = true;
                if self.name() == self.now().found || !protocol.compares_before_unlink {
                    self.to(Pc::ReclaimUnlink);
                } else {
                    self.unlock();
                    self.to(Pc::ReclaimClose);
                }
            }
            Pc::ReclaimUnlink => {
                let (target, found) = (self.now().target, self.now().found);
                unlink(setting, self.state, self.me, target, found);
                self.unlock();
                self.to(Pc::ReclaimClose);
            }
            Pc::ReclaimClose => {
                self.process().found = None;
                self.process().is_freeing = false;
                match self.now().why {
                    Why::Look => self.look_again(),
                    Why::Sweep => self.sweep_next(),
                    Why::LastOut => self.is_out(),
                }
            }

            // C1, `prefault::check_room`, and what `Opening::look` makes of it.
            Pc::CheckRoom => {
                if self.state.has_room(setting, PIECES) {
                    self.to(if setting.tmpfile {
                        Pc::PublishUnnamed
                    } else {
                        Pc::PublishTemporary
                    });
                } else {
                    self.unlock();
                    self.to(Pc::AskFreeing);
                }
            }
            Pc::AskFreeing => {
                if self.is_freeing() {
                    self.look_again();
                } else if protocol.looks_at_room_twice {
                    self.to(Pc::LookAtRoomAgain);
                } else {
                    self.fail_for_space();
                }
            }
            Pc::LookAtRoomAgain => {
                if self.state.has_room(setting, PIECES) {
                    self.look_again();
                } else {
                    self.fail_for_space();
                }
            }

            // `Opening::may_try_again`.
            Pc::TryAgainAskFreeing => {
                if self.is_freeing() {
                    self.look_again();
                } else {
                    self.to(Pc::TryAgainLookAtRoom);
                }
            }
            Pc::TryAgainLookAtRoom => {
                if self.state.has_room(setting, PIECES) {
                    self.look_again();
                } else {
                    self.fail_for_space();
                }
            }

            // C2, `Locked::publish`.
            Pc::PublishUnnamed => {
                let ino = self.make_inode();
                let signs = self.published_signs(ino);
                self.process().published = Some(signs);
                self.process().file = None;
                self.state.inode(ino).is_sized = true;
                self.to(Pc::Link);
            }
            Pc::Link => {
                let ino = self.now().published.expect("made").ino;
                let target = self.now().target;
                if self.name().is_some() && protocol.publishes_without_replacing {
                    self.process().published = None;
                    self.unlock();
                    self.look_again();
                } else {
                    unlink(setting, self.state, self.me, target, None);
                    self.state.names[usize::from(target)] = Some(ino);
                    self.process().is_creator = true;
                    self.to(Pc::LinkedOpen);
                }
            }
            // `Locked::reopen_by_name`.
            Pc::LinkedOpen => {
                let published = self.now().published.map(|open| open.ino);
                if self.name() == published {
                    self.process().file = published.map(Open::bare);
                    self.to(Pc::LinkedShowLife);
                } else {
                    self.process().published = None;
                    self.process().is_creator = false;
                    self.unlock();
                    self.look_again();
                }
            }
            Pc::LinkedShowLife => {
                let ino = self.file().ino;
                *self.file() = self.creators_signs(ino);
                self.unlock();
                self.to(Pc::Map);
            }

            // C2 where `O_TMPFILE` is refused, `Locked::publish_renamed`.
            Pc::PublishTemporary => {
                let free = self.state.names[FIRST_TEMPORARY..].iter().position(Option::is_none);
                let temporary = FIRST_TEMPORARY + free.expect("one name for each of three");
                let ino = self.make_inode();
                self.state.names[temporary] = Some(ino);
                self.process().temporary = temporary as u8;
                self.process().file = None;
                self.process().published = Some(Open::bare(ino));
                self.to(Pc::TemporaryShowLife);
            }
            Pc::TemporaryShowLife => {
                let ino = self.now().published.expect("made").ino;
                self.state.inode(ino).is_sized = true;
                self.process().published = Some(self.published_signs(ino));
                self.to(Pc::TemporaryRename);
            }
            Pc::TemporaryRename => {
                let ino = self.now().published.expect("made").ino;
                let (target, temporary) = (self.now().target, self.now().temporary);
                let is_free = self.name().is_none();
                if self.state.names[usize::from(temporary)] == Some(ino) {
                    self.state.names[usize::from(temporary)] = None;
                }
                if is_free || !protocol.publishes_without_replacing {
                    unlink(setting, self.state, self.me, target, None);
                    self.state.names[usize::from(target)] = Some(ino);
                    self.process().is_creator = true;
                    self.to(Pc::LinkedOpen);
                } else {
                    self.process().published = None;
                    self.unlock();
                    self.look_again();
                }
                self.process().temporary = 0;
            }

            // C3 to C5, `Opening::prepare`. Which thread backs which piece, and with what, nobody sees.
            Pc::Map => {
                self.process().is_mapped = true;
                self.to(Pc::Reserve);
            }
            Pc::Reserve => match self.reserve_piece() {
                Some(true) => self.to(Pc::MapAhead),
                Some(false) => {}
                None => self.refuse(),
            },
            Pc::MapAhead => self.to(Pc::EndPreparing),
            Pc::EndPreparing => {
                self.end_preparing();
                self.process().is_ready = true;
                self.opened();
            }

            // J1 and J2, `Opening::assess` and `Locked::attach`.
            Pc::AssessGeometry => {
                match (self.now().found_geometry, self.now().found_was_sized) {
                    (Some(geometry), true) if geometry == self.geometry => self.to(Pc::AssessPreparing),
                    (Some(_), _) => self.is_in_the_way(), // GeometryMismatch
                    (None, true) => self.to(Pc::AssessPreparing),
                    (None, false) => self.wait(),
                }
            }
            Pc::AskWhetherTheyAreDying => {
                let is_held = self.state.has_living_holder(self.found(), None);
                if is_held || !protocol.waits_for_the_dying {
                    self.state.seen.refused_for_the_dying |= !is_held;
                    self.gone();
                } else {
                    self.wait();
                }
            }
            Pc::AssessPreparing => {
                let found = self.found();
                if self.maps_ahead && self.state.is_preparing(found) && protocol.waits_for_preparing {
                    self.wait();
                } else {
                    self.to(Pc::AttachOpen);
                }
            }
            Pc::AttachOpen => {
                let found = self.found();
                if self.name() == Some(found) {
                    self.process().file = Some(Open::bare(found));
                    self.to(Pc::AttachFlock);
                } else {
                    self.name_changed();
                }
            }
            Pc::AttachFlock => {
                let ino = self.file().ino;
                if self.state.is_flocked_exclusively(ino, self.me) {
                    self.process().file = None;
                    self.wait();
                } else {
                    self.file().life = true;
                    self.file().geometry = self.announces_geometry();
                    self.to(Pc::AttachedLook);
                }
            }
            Pc::AttachedLook => {
                if self.name() == self.now().found {
                    self.process().found = None;
                    self.process().found_geometry = None;
                    self.unlock();
                    self.to(Pc::JoinLook);
                } else {
                    self.name_changed();
                }
            }

            // J3 to J5, `Opening::join`.
            Pc::JoinLook => {
                let ino = self.file().ino;
                if self.maps_ahead || !self.state.is_preparing(ino) {
                    self.process().is_ready = true;
                    self.to(Pc::JoinReserve);
                } else {
                    self.process().is_ready = !protocol.awaits_backing;
                    self.to(Pc::JoinMap);
                }
            }
            Pc::JoinReserve => {
                let ino = self.file().ino;
                if self.state.inode(ino).reserved == PIECES || !protocol.joiner_reserves {
                    self.to(Pc::JoinMap);
                } else if self.reserve_piece().is_none() {
                    self.refuse();
                }
            }
            Pc::JoinMap if self.maps_ahead => {
                self.process().is_mapped = true;
                self.to(Pc::JoinMapAhead);
            }
            Pc::JoinMap | Pc::JoinMapAhead => self.opened(),

            // J6, `Region::look_whether_ready`.
            Pc::AwaitBacking => {
                let ino = self.file().ino;
                if self.state.is_preparing(ino) {
                    return; // it looks again
                }
                if self.state.inode(ino).reserved == PIECES || !protocol.takes_over {
                    self.has_bytes();
                } else if self.reserve_piece().is_none() {
                    self.close(); // it is told, and what else should it do?
                }
            }

            // X1 to X6, `Region::close`; C7, `Opening::give_back`, goes the same way.
            Pc::Opened => self.close(),
            Pc::Abandon => {
                self.process().is_freeing = true;
                self.to(if protocol.gives_back_only_if_last {
                    Pc::CloseFile
                } else {
                    Pc::DropNameLock
                });
            }
            Pc::DropNameLock => {
                self.process().has_directory_lock = protocol.directory_lock;
                self.to(Pc::DropNameCompare);
            }
            Pc::DropNameCompare => {
                let ino = self.file().ino;
                if self.name() == Some(ino) || !protocol.compares_before_unlink {
                    self.to(Pc::DropNameUnlink);
                } else {
                    self.unlock();
                    self.to(Pc::CloseFile);
                }
            }
            Pc::DropNameUnlink => {
                let (target, ino) = (self.now().target, self.file().ino);
                unlink(setting, self.state, self.me, target, Some(ino));
                self.unlock();
                self.to(Pc::CloseFile);
            }
            // A mapping keeps the open file, whether its descriptor is closed or not.
            Pc::CloseFile if self.now().is_mapped => self.to(Pc::Unmap),
            // The kernel drops the locks of a file that is closed before its write access.
            Pc::CloseFile | Pc::Unmap | Pc::ViewLeft => {
                let ino = self.file().ino;
                let sees_another = self.announced_geometry(ino).is_some();
                self.process().saw_another = sees_another && !protocol.lets_go_before_it_looks;
                *self.file() = Open::bare(ino);
                self.process().is_mapped = false;
                self.to(Pc::Released);
            }
            Pc::Released => {
                let ino = self.file().ino;
                self.state.inode(ino).excused = false;
                self.process().file = None;
                let looks_back = protocol.last_one_out_cleans
                    && (protocol.last_view_looks_back || !self.now().has_views)
                    && (protocol.abandons || !self.now().has_failed)
                    && !self.now().saw_another;
                if self.now().is_creator || !looks_back {
                    self.is_out();
                } else {
                    self.last_out();
                }
            }
            _ => unreachable!("not a step of ours"),
        }
        self.state.collect();
    }
}
