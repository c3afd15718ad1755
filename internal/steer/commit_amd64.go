// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"errors"
	"os"
)

// describe returns the area of a process for others.
func (b *stagingArea) describe(pid int) Area {
	return Area{PID: pid, Start: b.Start, Bytes: b.Length, Path: b.Path(), Offset: b.Offset}
}

// stop has all steered threads stand still, and returns their areas.
func stop(all []*steering) (areas []Area, err error) {
	for _, s := range all {
		s.end()
	}
	for _, s := range all {
		select {
		case <-s.stopped:
			for _, b := range s.areas {
				areas = append(areas, b.describe(s.target.PID))
			}
		case <-s.done: // it failed, or the process has ended
			err = errors.Join(err, s.err)
		}
	}
	return areas, err
}

// commit ends all steering, at once, and adds the areas' files to kept.
func commit(all []*steering, kept []*os.File) (r reply, _ []*os.File, err error) {
	if _, err := stop(all); err != nil {
		return r, kept, errors.Join(err, abort(all))
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
			if !b.emptied {
				b.Remove()
				continue
			}
			if w := b.WriteThrough(); w != nil && w.Undropped() != nil {
				r.Notes = append(r.Notes, w.Undropped().Error())
			}
			kept = append(kept, b.Handle)
			a := b.describe(s.target.PID)
			a.Written = b.StopWriteBehind()
			r.Areas = append(r.Areas, a)
		}
	}
	return r, kept, err
}

// abort ends all steering and gives up the files' names.
func abort(all []*steering) (err error) {
	for _, s := range all {
		close(s.aborted)
		s.end()
	}
	for _, s := range all {
		<-s.done
		err = errors.Join(err, s.err)
		s.removeReserved()
		for _, b := range s.areas {
			b.Remove()
		}
	}
	return err
}
