// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"errors"
	"os"
)

// area describes one for others.
func (s *steering) area(b *backing) Area {
	return Area{PID: s.target.PID, Start: b.start, Bytes: b.length, Path: b.path(), Offset: b.offset}
}

// settle has all steered threads stand still and gives their areas.
func settle(all []*steering) (areas []Area, err error) {
	for _, s := range all {
		s.end()
	}
	for _, s := range all {
		select {
		case <-s.settled:
			for _, b := range s.areas {
				areas = append(areas, s.area(b))
			}
		case <-s.done: // it failed, or the process has ended
			err = errors.Join(err, s.err)
		}
	}
	return areas, err
}

// collect ends all steering, at once, and adds the areas' files to kept.
func collect(all []*steering, kept []*os.File) (r reply, _ []*os.File, err error) {
	if _, err := settle(all); err != nil {
		return r, kept, errors.Join(err, abandon(all))
	}
	for _, s := range all {
		close(s.empty)
	}
	for _, s := range all {
		<-s.done
		err = errors.Join(err, s.err)
		r.Notes = append(r.Notes, s.notes...)
		s.removeReserved()
		for _, b := range s.areas {
			if !b.taken {
				b.remove()
				continue
			}
			if b.through != nil && b.through.undropped != nil {
				r.Notes = append(r.Notes, b.through.undropped.Error())
			}
			kept = append(kept, b.file)
			a := s.area(b)
			a.Written = b.early.end()
			r.Areas = append(r.Areas, a)
		}
	}
	return r, kept, err
}

// abandon ends all steering and gives up the files' names.
func abandon(all []*steering) (err error) {
	for _, s := range all {
		close(s.abandoned)
		s.end()
	}
	for _, s := range all {
		<-s.done
		err = errors.Join(err, s.err)
		s.removeReserved()
		for _, b := range s.areas {
			b.remove()
		}
	}
	return err
}
